// The reference backend's way of choosing pages: fp64, full sorts, one thread. See
// lib/backend/page_ops.h for what the operations do.
#pragma once

#include "lib/backend/page_ops.h"

namespace sluice::cpu::reference {

void page_means(const PageMeansParams& params);
void choose_pages(const ChoosePagesParams& params);

}  // namespace sluice::cpu::reference
