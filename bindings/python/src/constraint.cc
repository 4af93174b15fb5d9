// Constraints on the text of answers.
#include "sluice/constraint.h"

#include "bindings/python/src/common.h"

namespace sluice::python {
namespace {

// A schema as JSON, from a dict or from JSON. Needs the GIL.
std::string json_of(const nb::object& schema) {
  if (nb::isinstance<nb::str>(schema)) return nb::cast<std::string>(schema);
  return nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(schema));
}

PyConstraint compile(const std::shared_ptr<PyEngine>& engine, const nb::object& json_schema,
                     const std::optional<std::string>& regex,
                     const std::optional<std::string>& grammar, bool json_object) {
  const bool has_schema = !json_schema.is_none();
  if (int{has_schema} + int{regex.has_value()} + int{grammar.has_value()} + int{json_object} != 1) {
    throw Error(ErrorCode::usage,
                "constraint: give one of json_schema, regex, grammar and json_object");
  }
  const std::string schema = has_schema ? json_of(json_schema) : std::string();
  const Released unlocked;
  const std::lock_guard lock(engine->mutex);
  if (!engine->constraints) engine->constraints.emplace(engine->engine.tokenizer());
  const Constraints& all = *engine->constraints;
  if (regex) return {engine, all.regex(*regex)};
  if (grammar) return {engine, all.grammar(*grammar)};
  return {engine, has_schema ? all.json_schema(schema) : all.json_object()};
}

}  // namespace

std::optional<Constraint> constraint_of(const std::shared_ptr<PyConstraint>& from,
                                        const PyEngine& engine) {
  if (from == nullptr) return {};
  if (from->engine.get() != &engine) {
    throw Error(ErrorCode::usage, "`constraint` is of another engine");
  }
  return from->constraint;
}

void bind_constraint(nb::module_& module, nb::class_<PyEngine>& engine) {
  nb::class_<PyConstraint>(module, "Constraint",
                           "What the text of an answer has to be; see Engine.constraint.")
      .def_prop_ro("engine", [](const PyConstraint& self) { return self.engine; });
  engine.def("constraint", &compile, nb::kw_only(), nb::arg("json_schema") = nb::none(),
             nb::arg("regex") = nb::none(), nb::arg("grammar") = nb::none(),
             nb::arg("json_object") = false,
             "Compiles what the text of an answer has to be: JSON of a schema (a dict, or JSON), "
             "any JSON object, a text that matches an expression, or a grammar as llama.cpp reads "
             "it. Any number of answers of this engine may use it at a time.",
             nb::sig("def constraint(self, *, json_schema: dict | bool | str | None = None, regex: "
                     "str | None = None, grammar: str | None = None, json_object: bool = False) -> "
                     "Constraint"));
}

}  // namespace sluice::python
