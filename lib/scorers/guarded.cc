#include "lib/scorers/guarded.h"

#include <exception>
#include <string>
#include <type_traits>
#include <utility>

#include "sluice/errors.h"

namespace sluice::scorers {
namespace {

class Guarded : public Scorer {
 public:
  explicit Guarded(std::shared_ptr<const Scorer> scorer)
      : Scorer(scorer->info()), scorer_(std::move(scorer)) {}

  bool runs_on(Processor processor) const override {
    return guarded("runs_on", [&] { return scorer_->runs_on(processor); });
  }
  void check(const ScorerUse& use) const override {
    guarded("check", [&] { scorer_->check(use); });
  }
  IndexNeeds needs(const ScorerUse& use) const override {
    return guarded("needs", [&] { return scorer_->needs(use); });
  }
  void build(const BuildScorer& call) const override {
    guarded("build", [&] { scorer_->build(call); });
  }
  void truncate(const TruncateScorer& call) const override {
    guarded("truncate", [&] { scorer_->truncate(call); });
  }
  bool observes() const override {
    return guarded("observes", [&] { return scorer_->observes(); });
  }
  void observe(const ObserveScorer& call) const override {
    guarded("observe", [&] { scorer_->observe(call); });
  }
  std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const override {
    return guarded("bytes_read", [&] { return scorer_->bytes_read(use, extent); });
  }
  bool reads_rows() const override { return scorer_->reads_rows(); }
  bool digests() const override { return scorer_->digests(); }
  bool reads_channels() const override { return scorer_->reads_channels(); }

  void score(const RunScorer& call) const override {
    guarded("score", [&] { scorer_->score(call); });
    if (call.reads != nullptr) require_declared(call);
  }

 private:
  // What was read on the host, against what bytes_read() says of every KV head of a token.
  void require_declared(const RunScorer& call) const {
    for (std::int64_t i = 0; i < call.batch.count; ++i) {
      ScanExtent extent = call.extent;
      extent.pages = call.batch.tokens[i].pages();
      const std::uint64_t declared = bytes_read(call.use, extent);
      for (int head = 0; head < call.use.shape.kv_heads; ++head) {
        const std::uint64_t read = call.reads->count(i, head).all_bytes(call.use.shape);
        if (read <= declared) continue;
        fail(ErrorCode::unsupported, "score",
             "read " + std::to_string(read) + " bytes for KV head " + std::to_string(head) +
                 " behind " + std::to_string(extent.pages) +
                 " pages, and bytes_read() declares at most " + std::to_string(declared));
      }
    }
  }

  [[noreturn]] void fail(ErrorCode code, const char* where, const std::string& what) const {
    throw Error(code, "the scorer '" + info().name + "' in " + where + "(): " + what);
  }

  template <typename Call>
  std::invoke_result_t<const Call&> guarded(const char* where, const Call& call) const {
    try {
      return call();
    } catch (const Error& error) {
      fail(error.code(), where, error.what());
    } catch (const std::exception& error) {
      fail(ErrorCode::unsupported, where, error.what());
    } catch (...) {
      fail(ErrorCode::unsupported, where, "threw what is no std::exception");
    }
  }

  std::shared_ptr<const Scorer> scorer_;
};

}  // namespace

std::shared_ptr<const Scorer> make_guarded(std::shared_ptr<const Scorer> scorer) {
  return std::make_shared<Guarded>(std::move(scorer));
}

}  // namespace sluice::scorers
