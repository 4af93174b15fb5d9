// What one step works on; public, for whoever writes a scorer.
#pragma once

#include "sluice/batch.h"
