#pragma once

namespace sluice::tools {

// tools/serve/page.html, from the build.
extern const char* const kPage;

}  // namespace sluice::tools
