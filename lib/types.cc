#include "sluice/types.h"

#include "lib/check.h"
#include "sluice/ledger.h"

namespace sluice {

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
  }
  check(false, "unknown dtype");
  return {};
}

std::string_view to_string(Tier tier) {
  switch (tier) {
    case Tier::device:
      return "device";
    case Tier::host:
      return "host";
    case Tier::disk:
      return "disk";
  }
  check(false, "unknown tier");
  return {};
}

std::string_view to_string(Cause cause) {
  switch (cause) {
    case Cause::append:
      return "append";
    case Cause::write_back:
      return "write_back";
    case Cause::hit:
      return "hit";
    case Cause::miss:
      return "miss";
    case Cause::index_read:
      return "index_read";
    case Cause::value_read:
      return "value_read";
    case Cause::evict:
      return "evict";
    case Cause::index_swap:
      return "index_swap";
  }
  check(false, "unknown cause");
  return {};
}

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::prefill:
      return "prefill";
    case Phase::decode:
      return "decode";
    case Phase::correction:
      return "correction";
  }
  check(false, "unknown phase");
  return {};
}

}  // namespace sluice
