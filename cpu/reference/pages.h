// The reference backend's choice of pages: fp64, full sorts, one thread. See lib/backend/page_ops.h
// for the operations.
#pragma once

#include "lib/backend/page_ops.h"

namespace sluice::cpu::reference {

void page_means(const PageMeansParams& params);
void choose_pages(const ChoosePagesParams& params);

}  // namespace sluice::cpu::reference
