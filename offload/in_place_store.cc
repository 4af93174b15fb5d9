#include <vector>

#include "offload/host_store.h"
#include "offload/kv_store.h"

namespace sluice {
namespace {

class InPlaceStore : public KvStore {
 public:
  InPlaceStore(Backend& backend, const KvPlan& plan)
      : backend_(&backend), shape_(plan.shape), host_(backend, plan.shape, plan.context) {}

  void begin(const StepRange& step) override { host_.grow(step.end()); }

  void append(int layer, const StepRange& step, const NewRows& rows, Ledger& ledger) override {
    std::vector<std::byte*> to;
    for (int head = 0; head < shape_.kv_heads; ++head) {
      to.push_back(host_.row(layer, head, step.first));
    }
    backend_->append({rows.k, rows.v, step.tokens, rows.stride, shape_, to});
    ledger.record(layer, Tier::host, Tier::host, Cause::append, traffic_of(shape_, step.tokens));
  }

  void attend(int layer, const StepRange& step, const Queries& queries, Ledger& ledger) override {
    std::vector<RowSpan> rows;
    for (int head = 0; head < shape_.kv_heads; ++head) {
      rows.push_back({host_.row(layer, head, 0), step.end()});
    }
    AttendParams params = attend_params(shape_, step, queries);
    params.rows = rows;
    backend_->attend(params);
    ledger.record(layer, Tier::host, Tier::host, Cause::hit, traffic_of(shape_, step.end()));
  }

  RowSource source(int layer, int head) const override {
    return {nullptr, 0, host_.row(layer, head, 0)};
  }

  const std::byte* newest(int layer, int head, std::int64_t first) const override {
    return host_.row(layer, head, first);
  }

  void rewind(std::int64_t /*length*/, Ledger& /*ledger*/) override {}

 private:
  Backend* backend_;
  KvShape shape_;
  HostStore host_;
};

}  // namespace

std::unique_ptr<KvStore> make_in_place_store(Backend& backend, const KvPlan& plan) {
  return std::make_unique<InPlaceStore>(backend, plan);
}

}  // namespace sluice
