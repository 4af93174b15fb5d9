#include "tools/exit_code.h"

namespace sluice::tools {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::usage:
      return kUsageExit;
    case ErrorCode::not_found:
      return 3;
    case ErrorCode::corrupt:
      return 4;
    case ErrorCode::unsupported:
      return 5;
    case ErrorCode::tokenizer:
      return 6;
    case ErrorCode::prompt:
      return 7;
    case ErrorCode::memory:
      return kMemoryExit;
    case ErrorCode::io:
      return 9;
    case ErrorCode::internal:
      return kInternalExit;
    case ErrorCode::numeric:
      return 11;
  }
  return kInternalExit;
}

}  // namespace sluice::tools
