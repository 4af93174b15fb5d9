// Grammars as text: rules of literals, classes, groups and repetitions, as llama.cpp reads them
// ("GBNF").
//
//   root  ::= "[" pair ("," pair)* "]"     # a comment
//   pair  ::= [a-z]+ "=" [^\n,\]]{1,8} | name
//
// A rule may go on over several lines. Text begins with `root`.
#pragma once

#include <string_view>

#include "engine/constrain/grammar.h"

namespace sluice::constrain {

// Throws Error{usage} that names the line and what is wrong there.
void compile_rules(std::string_view rules, Grammar& grammar);

}  // namespace sluice::constrain
