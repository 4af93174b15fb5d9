// Unicode normalisation form C, which some tokenizers apply to text before they split it.
#pragma once

#include <string>
#include <string_view>

namespace sluice {

// `text` must be valid UTF-8. Takes time linear in its length, whatever it holds.
std::string to_nfc(std::string_view text);

}  // namespace sluice
