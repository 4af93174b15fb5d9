// What the scorer of examples/scorer must estimate and select, and what attention to that gives:
// from the definition in signs.h, fp64, sharing nothing with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "sluice/batch.h"
#include "tests/support/elements.h"
#include "tests/support/script.h"

namespace sluice::testing {

// Keys and values as rows have them, [tokens, kv_heads, head_dim], and the selection's definition.
class SignsOracle {
 public:
  SignsOracle(const KvShape& shape, const Script& script, std::size_t layer, std::int64_t tokens)
      : shape_(shape),
        q_(script.q(layer, 0), script.q(layer, 0) + tokens * script.query_width()),
        k_(rows(script.k(layer, 0), tokens)),
        v_(rows(script.v(layer, 0), tokens)) {}

  // Logits of the whole pages before position `at`.
  std::vector<double> estimates(std::int64_t at, int query) const {
    std::vector<double> logits(static_cast<std::size_t>(at / kPageTokens * kPageTokens));
    for (std::size_t first = 0; first < logits.size(); first += kPageTokens) {
      const auto token = static_cast<std::int64_t>(first);
      for (int c = 0; c < shape_.head_dim; ++c) {
        double mean = 0.0;
        double distance = 0.0;
        for (int t = 0; t < kPageTokens; ++t) mean += key(token + t, query, c) / kPageTokens;
        for (int t = 0; t < kPageTokens; ++t) {
          distance += std::fabs(key(token + t, query, c) - mean) / kPageTokens;
        }
        const double factor = q(at, query, c) / std::sqrt(shape_.head_dim);
        for (int t = 0; t < kPageTokens; ++t) {
          logits[first + static_cast<std::size_t>(t)] +=
              factor * (mean + (key(token + t, query, c) > mean ? distance : -distance));
        }
      }
    }
    return logits;
  }

  // What position `at` attends to of the pages before its own: the k heaviest by their weight,
  // summed over the query heads, whose softmax the newest rows take part in.
  std::vector<std::int64_t> selected(std::int64_t at, int kv_head, std::size_t k) const {
    const std::vector<double> weights = this->weights(at, kv_head);
    std::vector<std::int64_t> order(weights.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return weights[static_cast<std::size_t>(a)] > weights[static_cast<std::size_t>(b)];
    });
    order.resize(std::min(order.size(), k));
    return order;
  }

  // By what part the lightest of these k outweighs the heaviest of the others.
  double lead(std::int64_t at, int kv_head, std::size_t k) const {
    std::vector<double> weights = this->weights(at, kv_head);
    std::sort(weights.begin(), weights.end(), std::greater<>());
    return weights[k - 1] / weights[k] - 1.0;
  }

  // Those weights, of every position before the page of `at`.
  std::vector<double> weights(std::int64_t at, int kv_head) const {
    const std::int64_t first = at / kPageTokens * kPageTokens;
    std::vector<double> weights(static_cast<std::size_t>(first));
    for (int g = 0; g < shape_.group(); ++g) {
      const int query = kv_head * shape_.group() + g;
      std::vector<double> logits = estimates(at, query);
      for (std::int64_t t = first; t <= at; ++t) logits.push_back(logit(at, query, t));
      const double highest = *std::max_element(logits.begin(), logits.end());
      double sum = 0.0;
      for (double& x : logits) sum += x = std::exp(x - highest);
      for (std::size_t t = 0; t < weights.size(); ++t) weights[t] += logits[t] / sum;
    }
    return weights;
  }

  // Attention of position `at` to what is selected and to its own page, [query_heads, head_dim].
  std::vector<float> output(std::int64_t at, std::size_t k) const {
    std::vector<float> result;
    for (int query = 0; query < shape_.query_heads; ++query) {
      std::vector<std::int64_t> positions = selected(at, query / shape_.group(), k);
      for (std::int64_t t = at / kPageTokens * kPageTokens; t <= at; ++t) positions.push_back(t);
      std::vector<double> sums(static_cast<std::size_t>(shape_.head_dim));
      double total = 0.0;
      for (const std::int64_t t : positions) {
        const double weight = std::exp(logit(at, query, t) - 20.0);
        total += weight;
        for (int c = 0; c < shape_.head_dim; ++c) {
          sums[static_cast<std::size_t>(c)] += weight * element(v_, t, query, c);
        }
      }
      for (const double sum : sums) result.push_back(static_cast<float>(sum / total));
    }
    return result;
  }

 private:
  std::vector<float> rows(const float* from, std::int64_t tokens) const {
    return rounded({from, from + tokens * shape_.kv_heads * shape_.head_dim}, shape_.rows.element);
  }
  double element(const std::vector<float>& rows, std::int64_t token, int query, int c) const {
    const std::int64_t head = token * shape_.kv_heads + query / shape_.group();
    return rows[static_cast<std::size_t>(head * shape_.head_dim + c)];
  }
  double key(std::int64_t token, int query, int c) const { return element(k_, token, query, c); }
  double q(std::int64_t at, int query, int c) const {
    return q_[static_cast<std::size_t>((at * shape_.query_heads + query) * shape_.head_dim + c)];
  }
  double logit(std::int64_t at, int query, std::int64_t token) const {
    double sum = 0.0;
    for (int c = 0; c < shape_.head_dim; ++c) sum += q(at, query, c) * key(token, query, c);
    return sum / std::sqrt(shape_.head_dim);
  }

  KvShape shape_;
  std::vector<float> q_, k_, v_;
};

}  // namespace sluice::testing
