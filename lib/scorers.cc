#include <algorithm>
#include <cmath>
#include <utility>

#include "lib/scorers/guarded.h"
#include "lib/scorers/own.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/scorer.h"

namespace sluice {
namespace {

bool may_be_name(std::string_view name) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  };
  return !name.empty() && std::all_of(name.begin(), name.end(), fits);
}

bool takes(const ScorerInfo& info, const std::string& name, double value) {
  const auto found = std::find_if(info.parameters.begin(), info.parameters.end(),
                                  [&](const ScorerParameter& p) { return p.name == name; });
  if (found == info.parameters.end()) return false;
  // The comparisons are false for NaN.
  return value >= found->least && value <= found->most &&
         (!found->whole || value == std::floor(value));
}

}  // namespace

std::string_view to_string(Processor processor) {
  return processor == Processor::host ? "the host" : "CUDA";
}

const Scorers& own_scorers() {
  static const Scorers own({scorers::make_dense(), scorers::make_streaming(), scorers::make_exact(),
                            scorers::make_int4(), scorers::make_quest(), scorers::make_sparq(),
                            scorers::make_guarded(scorers::make_double_sparsity()),
                            scorers::make_guarded(scorers::make_snapkv()),
                            scorers::make_guarded(scorers::make_h2o())});
  return own;
}

// Shares the scorer objects of own_scorers(), because has() compares objects.
Scorers::Scorers() : Scorers(own_scorers()) {}

Scorers::Scorers(std::vector<std::shared_ptr<const Scorer>> all) : all_(std::move(all)) {}

void Scorers::add(std::shared_ptr<const Scorer> scorer) {
  const auto refuse = [](const std::string& why) {
    throw Error(ErrorCode::usage, "a scorer: " + why);
  };
  if (scorer == nullptr) refuse("there is none");
  const ScorerInfo& info = scorer->info();
  if (!may_be_name(info.name)) refuse("its name has to be of lower-case letters, digits and _");
  if (find(info.name) != nullptr) refuse("there is a '" + info.name + "' already");
  if (info.kind == ScorerInfo::Kind::dense) refuse("'" + info.name + "' cannot be dense");
  for (const ScorerParameter& parameter : info.parameters) {
    if (!may_be_name(parameter.name) || parameter.range.empty()) {
      refuse("a parameter of '" + info.name + "' needs a name and a range in words");
    }
  }
  all_.push_back(scorers::make_guarded(std::move(scorer)));
}

const Scorer* Scorers::find(std::string_view name) const {
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [&](const auto& scorer) { return scorer->info().name == name; });
  return found == all_.end() ? nullptr : found->get();
}

bool Scorers::accepts(const Method& method) const {
  const Scorer* const scorer = find(method.name);
  return scorer != nullptr &&
         std::all_of(method.parameters.begin(), method.parameters.end(),
                     [&](const auto& p) { return takes(scorer->info(), p.first, p.second); });
}

const Scorer& Scorers::at(const Method& method) const {
  if (accepts(method)) return *find(method.name);
  throw Error(ErrorCode::usage,
              "policy: there is no select=" + to_string(method) + "; select takes " + accepted());
}

std::string Scorers::accepted() const {
  std::vector<std::string> forms;
  for (const auto& scorer : all_) {
    const ScorerInfo& info = scorer->info();
    forms.push_back(info.name);
    std::string list;
    for (const ScorerParameter& parameter : info.parameters) {
      std::string range = parameter.range;
      if (const auto at = range.find(" to "); at != range.npos) range.replace(at, 4, "..");
      list += (list.empty() ? "" : ",") + parameter.name + "=" + range;
    }
    if (!list.empty()) forms.push_back(info.name + "(" + list + ")");
  }
  return alternatives(forms);
}

std::string Scorers::names(std::initializer_list<ScorerInfo::Kind> kinds) const {
  std::vector<std::string> names;
  for (const auto& scorer : all_) {
    const ScorerInfo& info = scorer->info();
    if (std::find(kinds.begin(), kinds.end(), info.kind) != kinds.end()) names.push_back(info.name);
  }
  return alternatives(names);
}

}  // namespace sluice
