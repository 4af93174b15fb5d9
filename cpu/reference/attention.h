// The reference backend's attention, written from its definition: fp64, one thread. See
// lib/backend/kv_ops.h for the operations.
#pragma once

#include "cpu/reference/reads.h"
#include "lib/backend/kv_ops.h"

namespace sluice::cpu::reference {

void attend(const AttendParams& params, ReferenceReads& reads);
void attend_batch(const AttendBatchParams& params, ReferenceReads& reads);
void attend_selected(const AttendSelectedParams& params, ReferenceReads& reads);
void gather(const GatherParams& params, ReferenceReads& reads);

}  // namespace sluice::cpu::reference
