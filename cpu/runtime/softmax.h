// Softmax over long rows of scores, at once or page by page.
#pragma once

#include <cstdint>
#include <span>

namespace sluice::cpu {

// x = softmax(x); `lse`, if not null, is the log-sum-exp of the original x. Returns false, with
// both undefined, if a score is NaN or +Inf or none is above -Inf. Sums are fp32, one per vector
// lane.
bool softmax(float* x, std::int64_t count, float* lse = nullptr);

struct PageSum {
  float level = 0.0f;  // the largest score
  float sum = 0.0f;    // of e^(score - level); NaN if a score was NaN or +Inf
};

// x = e^(x - level) for one page's scores, [kPageTokens]; 0 if all are -Inf.
PageSum exp_page(float* x);

// Softmax over pages by the level and sum that exp_page() returned: level = e^(level - lse).
// Returns false, with all undefined, where softmax() of their scores would.
bool softmax_pages(float* levels, const float* sums, std::int64_t pages, float* lse = nullptr);

// Weighted sum of several rows' weights of one page: sums = factors[0] * rows[0] + ...,
// [kPageTokens] each. Returns the largest sum.
struct PageRow {
  const float* weights = nullptr;
  float factor = 1.0f;
};
float sum_page_rows(std::span<const PageRow> rows, float* sums);

// x *= factor.
void multiply(float* x, std::int64_t count, float factor);

// to += factor * from.
void add_to(const float* from, std::int64_t count, float* to, float factor = 1.0f);

}  // namespace sluice::cpu
