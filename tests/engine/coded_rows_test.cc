// Models whose keys and values are kept in codes: the loss, and half of the bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "sluice/engine.h"
#include "sluice/policy.h"
#include "tests/support/backends.h"

namespace sluice {
namespace {

const std::filesystem::path kSource = SLUICE_SOURCE_DIR;
constexpr std::size_t kTokens = 512;

Engine open(const RowFormat& rows, const std::string& device = "cpu") {
  EngineConfig config;
  config.device = device;
  config.model = kSource / "models/sluice-22m";
  config.compute = DType::f32;
  config.kv_dtype = rows;
  config.threads = 2;
  return Engine::open(config);
}

// Log-probabilities after each of the last tokens of a piece of a book, decoded behind a prefill of
// the others.
std::vector<std::vector<double>> book_answers(const RowFormat& rows, const char* policy,
                                              const std::string& device = "cpu") {
  Engine engine = open(rows, device);
  std::ifstream file(kSource / "data/war-and-peace.txt");
  const std::string book{std::istreambuf_iterator<char>(file), {}};
  std::vector<TokenId> ids =
      engine.encode_prompt(book.substr(book.find('\n', book.size() / 2), 8 * kTokens));
  EXPECT_GE(ids.size(), kTokens);
  ids.resize(kTokens);
  SessionOptions options;
  options.context = kTokens;
  options.decode_batch = 32;
  options.policies = {engine.policy(policy)};
  Session session = engine.new_session(options);
  const auto half = ids.begin() + kTokens / 2;
  session.prefill({ids.begin(), half});
  std::vector<std::vector<double>> all;
  session.decode_known({half, ids.end()}, [&](std::size_t, std::span<const float> logits) {
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (const float logit : logits) sum += std::exp(logit - most);
    std::vector<double>& answer = all.emplace_back();
    for (const float logit : logits) answer.push_back(logit - most - std::log(sum));
  });
  return all;
}

// KL per token.
double loss_of(const std::vector<std::vector<double>>& exact,
               const std::vector<std::vector<double>>& other) {
  EXPECT_EQ(exact.size(), other.size());
  double sum = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    for (std::size_t id = 0; id < exact[i].size(); ++id) {
      sum += std::exp(exact[i][id]) * (exact[i][id] - other[i][id]);
    }
  }
  return sum / static_cast<double>(exact.size());
}

class CodedRowsModel : public ::testing::TestWithParam<std::string> {};

TEST_P(CodedRowsModel, LosesLittle) {
  const std::string& device = GetParam();
  if (testing::skips(device)) return;
  const auto exact = book_answers(DType::f32, "dense");
  const double dense = loss_of(exact, book_answers(RowCode::int8, "dense", device));
  const double values = loss_of(exact, book_answers(DType::bf16, "values", device));
  const double coded_values = loss_of(exact, book_answers(RowCode::int8, "values", device));
  const double small = loss_of(exact, book_answers(RowCode::k8v4, "dense", device));
  std::printf(
      "KL of dense with int8 %.5f, with k8v4 %.5f; of values with bf16 %.5f, with int8 %.5f\n",
      dense, small, values, coded_values);
  EXPECT_LT(dense, 0.001);
  EXPECT_GT(dense, 1e-7) << "rows are not coded";
  EXPECT_LT(coded_values, values + 0.0005);
  EXPECT_LT(small, 0.012);
  EXPECT_GT(small, 3 * dense) << "values are not in 4 bits";
}

INSTANTIATE_TEST_SUITE_P(Devices, CodedRowsModel, ::testing::ValuesIn(testing::devices()),
                         [](const auto& of) { return of.param; });

TEST(CodedRows, PlansHalfOfTheRows) {
  const Engine bf16 = open(DType::bf16);
  const Engine int8 = open(RowCode::int8);
  EXPECT_EQ(int8.info().kv.rows, RowFormat(RowCode::int8));
  EXPECT_EQ(bf16.info().kv.token_bytes(), 2 * int8.info().kv.token_bytes());
  // Tables take the same.
  EXPECT_EQ(bf16.plan(8192).kv.host_bytes - int8.plan(8192).kv.host_bytes,
            8192 * int8.info().kv.token_bytes());
}

}  // namespace
}  // namespace sluice
