// Elements moved per decoded token as the literature counts them, to compare with the ledger.
//
// Source: SparQ (Ribar et al. 2023), equation 11 and appendix G. All are per attention head and
// layer, for a cache of `tokens` tokens, and count a key or a value as head_dim elements. They
// include writing the new key and value, and assume that each head has keys of its own (MHA).
// Multiply by the bytes of an element for bytes.
#pragma once

#include <cstdint>

namespace sluice {

struct TransferShape {
  std::int64_t tokens = 0;    // S
  std::int64_t head_dim = 0;  // d
  std::int64_t kept = 0;      // k, tokens whose rows are read
  std::int64_t channels = 0;  // r, of SparQ
};

// Every key and value: 2 S d + 2 d.
std::int64_t dense_transfers(const TransferShape& shape);
// r channels of every key, k keys and values, the mean value read and written: S r + 2 k d + 4 d.
std::int64_t sparq_transfers(const TransferShape& shape);
// k keys and values, and the accumulated scores read and written: 2 k d + 2 d + 2 S. Source: Zhang
// et al. 2023, H2O.
std::int64_t h2o_transfers(const TransferShape& shape);
// k keys and values: 2 k d + 2 d. Source: Han et al. 2023, LM-Infinite; StreamingLLM counts alike.
std::int64_t lm_infinite_transfers(const TransferShape& shape);
// Every key, and the values of k tokens: S d + k d + 2 d. Source: Sheng et al. 2023, FlexGen.
std::int64_t flexgen_transfers(const TransferShape& shape);

}  // namespace sluice
