// --json-schema, --regex and --grammar: the text that an answer has to be.
#pragma once

#include <CLI/CLI.hpp>
#include <initializer_list>
#include <optional>
#include <string>

#include "sluice/constraint.h"
#include "sluice/engine.h"

namespace sluice::tools {

struct ConstraintFlags {
  std::string json_schema;  // a file
  std::string regex;
  std::string grammar;  // a file

  // Options that exclude each other and the `others`.
  void add_to(CLI::App& app, std::initializer_list<CLI::Option*> others);
  // The constraint that was asked for, if any. Throws what reading a file and Constraints throw;
  // messages begin with the flag.
  std::optional<Constraint> compile(const Engine& engine) const;
};

}  // namespace sluice::tools
