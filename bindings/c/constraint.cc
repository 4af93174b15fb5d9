// Constraints on the text of answers.
#include <string_view>
#include <utility>

#include "bindings/c/call.h"
#include "bindings/c/objects.h"

namespace sluice::c {
namespace {

Constraint compiled(EngineObject& object, sluice_constraint_kind kind, std::string_view text) {
  const std::lock_guard lock(object.mutex);
  if (!object.constraints) object.constraints.emplace(object.engine.tokenizer());
  switch (kind) {
    case SLUICE_JSON_OBJECT:
      if (!text.empty()) refuse("`text`: SLUICE_JSON_OBJECT takes none");
      return object.constraints->json_object();
    case SLUICE_JSON_SCHEMA:
      return object.constraints->json_schema(text);
    case SLUICE_REGEX:
      return object.constraints->regex(text);
    case SLUICE_GRAMMAR:
      return object.constraints->grammar(text);
    default:
      refuse("no such sluice_constraint_kind");
  }
}

}  // namespace

std::optional<Constraint> constraint_of(sluice_constraint* handle, const EngineObject& engine) {
  if (handle == nullptr) return {};
  const auto object = find<ConstraintObject>(handle);
  if (object->engine.get() != &engine) refuse("`constraint` is of another engine");
  return object->constraint;
}

}  // namespace sluice::c

using namespace sluice::c;  // NOLINT(google-build-using-namespace)

sluice_code sluice_constraint_create(sluice_engine* engine, sluice_constraint_kind kind,
                                     const char* text, size_t bytes,
                                     sluice_constraint** constraint) {
  return call([&] {
    auto object = find<EngineObject>(engine);
    need(constraint, "constraint");
    const auto from = array(text, bytes, "text");
    sluice::Constraint made = compiled(*object, kind, {from.data(), from.size()});
    *constraint = add<ConstraintObject, sluice_constraint>(
        std::make_shared<ConstraintObject>(ConstraintObject{std::move(object), std::move(made)}));
  });
}

sluice_code sluice_constraint_free(sluice_constraint* constraint) {
  return call([&] { take<ConstraintObject>(constraint); });
}
