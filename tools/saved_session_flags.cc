#include "tools/saved_session_flags.h"

#include <nlohmann/json.hpp>

#include "sluice/errors.h"

namespace sluice::tools {

void SavedSessionFlags::add_to(CLI::App& app, const std::string& loaded) {
  app.add_option("--load-session", load,
                 "directory of a saved session: " + loaded + "; nothing is computed again");
  app.add_option("--save-session", save,
                 "save the session there at the end: a new directory, or one that has an earlier "
                 "session of this model, which is replaced once the new one is on the disk whole");
}

void SavedSessionFlags::require_savable(const Engine& engine, std::int64_t tokens) const {
  if (!save.empty()) engine.require_savable(save, tokens);
}

std::string note_of(const GenerateResult& result) {
  nlohmann::json text = nlohmann::json::object();
  const bool ended = result.reason == FinishReason::end_of_text;
  if (result.pending && !ended) text["pending"] = *result.pending;
  return nlohmann::json{{"text", std::move(text)}}.dump();
}

std::optional<TokenId> pending_of(std::string_view note) {
  if (note.starts_with(R"({"chat":)")) {
    throw Error(ErrorCode::usage,
                "--load-session: the session is a conversation; continue it with 'sluice chat'");
  }
  const nlohmann::json json = nlohmann::json::parse(note, nullptr, false);
  const nlohmann::json::json_pointer path("/text/pending");
  if (!json.is_object() || !json.contains(path)) return std::nullopt;
  const nlohmann::json& pending = json.at(path);
  if (!pending.is_number_unsigned() || pending.get<std::uint64_t>() > 0x7fffffff) {
    return std::nullopt;
  }
  return pending.get<TokenId>();
}

}  // namespace sluice::tools
