#include "lib/value_tiles.h"

#include <string>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {

void check_value_tiles(int bits, int head_dim, float share, bool has_basis) {
  if (bits < 1 || bits > 4) {
    throw Error(ErrorCode::usage,
                "value tiles of " + std::to_string(bits) + " bits; there are 1, 2, 3 and 4");
  }
  if (!(share > 0.0f && share <= 1.0f)) {
    throw Error(ErrorCode::usage, "reading pages that carry " + digits(share) +
                                      " of the weight; it must be above 0 and at most 1");
  }
  const int unit = has_basis ? 8 : 4;
  if (head_dim <= 0 || head_dim > 256 || head_dim % unit != 0) {
    throw Error(ErrorCode::unsupported,
                std::string("value tiles ") + (has_basis ? "of half the components " : "") +
                    "for head_dim " + std::to_string(head_dim) + "; it must be a multiple of " +
                    std::to_string(unit) + " up to 256");
  }
}

}  // namespace sluice
