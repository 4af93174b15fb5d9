// Syntax trees of a template.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/jinja/value.h"

namespace sluice::jinja {

struct Expression {
  enum class Kind : std::uint8_t {
    literal,      // value
    name,         // name
    list,         // operands; a tuple, too
    dict,         // keys and values in turn
    attribute,    // operand . name
    item,         // operand [ operand ]
    slice,        // operand [ operand : operand : operand ], none for omitted ones
    call,         // operand ( operands, keywords = operands )
    filter,       // operand | name ( operands, keywords = operands )
    test,         // operand is name ( operands )
    prefix,       // "not", "-" or "+" operand
    binary,       // operand name operand, both are computed: + - * / // % ** ~ == != < > <= >= in
    logical,      // operand "and" or "or" operand
    conditional,  // operand if operand else operand, which may not be there
  };
  Kind kind = Kind::literal;
  std::string name;
  Value value;
  std::vector<Expression> operands;
  std::vector<std::string> keywords;  // the names of the last operands
  std::size_t depth = 1;              // of the tree
  std::size_t line = 1;
};

struct Branch;

struct Statement {
  enum class Kind : std::uint8_t {
    text,        // text
    output,      // {{ value }}
    set,         // {% set targets = value %}; "namespace.member" may be a target
    set_block,   // {% set target %} body {% endset %}
    loop,        // {% for targets in value if condition %} body {% else %} otherwise
    choice,      // {% if %}: branches, otherwise
    macro,       // {% macro name(targets = defaults) %} body
    group,       // {% generation %} body
    leave_loop,  // {% break %}
    next_round,  // {% continue %}
  };
  Kind kind = Kind::text;
  std::string name;
  Text text;
  std::vector<std::string> targets;
  Expression value;
  std::vector<Expression> condition;  // none or one
  std::vector<Expression> defaults;   // of the last targets
  std::vector<Statement> body;
  std::vector<Branch> branches;
  std::vector<Statement> otherwise;
  std::size_t line = 1;
};

struct Branch {
  Expression condition;
  std::vector<Statement> body;
};

// Throws Error{unsupported} naming the line, for invalid Jinja and for the parts of Jinja that chat
// templates do not use (blocks, imports, calls of macros with a body).
std::vector<Statement> parse(std::string_view source);

}  // namespace sluice::jinja
