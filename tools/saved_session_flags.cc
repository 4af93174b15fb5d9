#include "tools/saved_session_flags.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "sluice/errors.h"
#include "tools/flags.h"

namespace sluice::tools {
namespace {

constexpr TokenId kMostSavedId = 0x7fffffff;

std::optional<TokenId> token_id_of(const nlohmann::json& json) {
  if (!json.is_number_unsigned() || json.get<std::uint64_t>() > kMostSavedId) return std::nullopt;
  return json.get<TokenId>();
}

}  // namespace

void SavedSessionFlags::add_to(CLI::App& app, const std::string& loaded) {
  app.add_option("--load-session", load,
                 "directory of a saved session: " + loaded + "; nothing is computed again");
  app.add_option("--save-session", save,
                 "save the session there at the end: a new directory, or one that has an earlier "
                 "session of this model, which is replaced once the new one is on the disk whole");
}

void SavedSessionFlags::add_every_to(CLI::App& app) {
  add_integer(
      app, "--save-every", every,
      "also save while the prompt is read, after this many tokens each time, so that a prompt "
      "that is killed goes on from there; each time all rows until then are written")
      ->check(not_zero())
      ->needs("--save-session");
}

void SavedSessionFlags::require_savable(const Engine& engine, std::int64_t tokens) const {
  if (every < 0) {
    throw Error(ErrorCode::usage, "--save-every " + std::to_string(every) + ": give 1 or more");
  }
  if (!save.empty()) engine.require_savable(save, tokens);
}

std::string note_of(const SavedText& text) {
  nlohmann::json json = nlohmann::json::object();
  if (text.pending) json["pending"] = *text.pending;
  if (!text.unread.empty()) json["unread"] = text.unread;
  return nlohmann::json{{"text", std::move(json)}}.dump();
}

SavedText saved_text_of(std::string_view note) {
  if (note.starts_with(R"({"chat":)")) {
    throw Error(ErrorCode::usage,
                "--load-session: the session is a conversation; continue it with 'sluice chat'");
  }
  SavedText text;
  const nlohmann::json json = nlohmann::json::parse(note, nullptr, false);
  if (!json.is_object() || !json.contains("text") || !json["text"].is_object()) return text;
  const nlohmann::json& saved = json["text"];
  if (saved.contains("pending")) text.pending = token_id_of(saved["pending"]);
  if (!saved.contains("unread") || !saved["unread"].is_array()) return text;
  for (const nlohmann::json& entry : saved["unread"]) {
    const std::optional<TokenId> id = token_id_of(entry);
    if (!id) return {};
    text.unread.push_back(*id);
  }
  return text;
}

}  // namespace sluice::tools
