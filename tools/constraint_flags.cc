#include "tools/constraint_flags.h"

#include <array>

#include "io/file.h"
#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kMostBytes = 1 << 20;

}  // namespace

void ConstraintFlags::add_to(CLI::App& app, std::initializer_list<CLI::Option*> others) {
  const auto options = std::to_array<CLI::Option*>(
      {app.add_option("--json-schema", json_schema,
                      "a file with a JSON schema: the answer is a document that is valid under it"),
       app.add_option("--regex", regex, "the answer matches this regular expression as a whole"),
       app.add_option("--grammar", grammar,
                      "a file with rules as llama.cpp has them: the answer is a `root`")});
  for (CLI::Option* const option : options) {
    for (CLI::Option* const other : options) {
      if (other != option) option->excludes(other);
    }
    for (CLI::Option* const other : others) option->excludes(other);
  }
}

std::optional<Constraint> ConstraintFlags::compile(const Engine& engine) const {
  const auto compiled = [&](const char* flag, const auto& make) -> Constraint {
    try {
      return make(Constraints(engine.tokenizer()));
    } catch (const Error& error) {
      throw Error(error.code(), std::string(flag) + ": " + error.what());
    }
  };
  if (!json_schema.empty()) {
    const std::string text = read_text_file(json_schema, kMostBytes);
    return compiled("--json-schema", [&](const Constraints& all) { return all.json_schema(text); });
  }
  if (!regex.empty()) {
    return compiled("--regex", [&](const Constraints& all) { return all.regex(regex); });
  }
  if (!grammar.empty()) {
    const std::string text = read_text_file(grammar, kMostBytes);
    return compiled("--grammar", [&](const Constraints& all) { return all.grammar(text); });
  }
  return std::nullopt;
}

}  // namespace sluice::tools
