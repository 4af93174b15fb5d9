// JSON Schema (draft 2020-12, a part of it) as a grammar of the documents that are valid.
//
// Handled: `type`, `properties`, `required`, `additionalProperties`, `items`, `minItems`,
// `maxItems`, `minLength`, `maxLength`, `pattern`, `enum`, `const`, `anyOf`, `allOf` of one schema,
// `$ref` within the document, `$defs`, true and false. Annotations (`title`, `description`,
// `default`, `examples`, ...) say nothing about documents. Every other keyword is refused by name.
// Documents have the properties in the schema's order, then others if it allows them.
#pragma once

#include <string_view>

#include "engine/constrain/grammar.h"

namespace sluice::constrain {

// Throws Error{usage} for text that is not a schema or too large, and Error{unsupported} for
// keywords that are not handled; both name the place as a JSON pointer.
void compile_json_schema(std::string_view schema, Grammar& grammar);

// Any JSON object.
void compile_json_object(Grammar& grammar);

}  // namespace sluice::constrain
