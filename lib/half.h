// Public, for whoever writes a scorer.
#pragma once

#include "sluice/half.h"
