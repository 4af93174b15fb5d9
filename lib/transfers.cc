#include "sluice/transfers.h"

namespace sluice {

std::int64_t dense_transfers(const TransferShape& s) {
  return 2 * s.tokens * s.head_dim + 2 * s.head_dim;
}

std::int64_t sparq_transfers(const TransferShape& s) {
  return s.tokens * s.channels + 2 * s.kept * s.head_dim + 4 * s.head_dim;
}

std::int64_t h2o_transfers(const TransferShape& s) {
  return 2 * s.kept * s.head_dim + 2 * s.head_dim + 2 * s.tokens;
}

std::int64_t lm_infinite_transfers(const TransferShape& s) {
  return 2 * s.kept * s.head_dim + 2 * s.head_dim;
}

std::int64_t flexgen_transfers(const TransferShape& s) {
  return s.tokens * s.head_dim + s.kept * s.head_dim + 2 * s.head_dim;
}

}  // namespace sluice
