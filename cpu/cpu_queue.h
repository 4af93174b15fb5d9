// Queue of the CPU backend: every call returns when its work is done, so a queue is always idle.
#pragma once

#include "cpu/cpu_backend.h"
#include "cpu/dense/rope_table.h"
#include "lib/backend/queue.h"

namespace sluice::cpu {

class CpuQueue : public Queue {
 public:
  explicit CpuQueue(CpuBackend& backend) : Queue(backend) {}

  void submit(const Operation& operation) override;
  void wait_for(Queue& /*other*/) override {}
  void synchronize() override { static_cast<void>(backend()); }

 private:
  RopeTable rope_table_;
};

}  // namespace sluice::cpu
