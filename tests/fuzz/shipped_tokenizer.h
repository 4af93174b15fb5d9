// The tokenizer of sluice-22m.
#pragma once

#include "sluice/tokenizer.h"

namespace sluice::fuzz {

inline const Tokenizer& tokenizer() {
  constexpr int kVocabulary = 4096;
  static const Tokenizer tokenizer =
      Tokenizer::load(SLUICE_SOURCE_DIR "/models/sluice-22m/tokenizer.json", kVocabulary);
  return tokenizer;
}

}  // namespace sluice::fuzz
