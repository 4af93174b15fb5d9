# Every dependency is a system package (scripts/setup.sh names them for Debian); nothing is
# downloaded here.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(TBB REQUIRED)
find_package(dnnl REQUIRED)
find_package(hwy REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(CLI11 REQUIRED)
pkg_check_modules(hwloc REQUIRED IMPORTED_TARGET hwloc)
pkg_check_modules(libedit REQUIRED IMPORTED_TARGET libedit)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(httplib REQUIRED IMPORTED_TARGET cpp-httplib)
find_path(SLUICE_XXHASH_HEADERS xxhash.h REQUIRED)
# Optional: io_uring, where the kernel allows it.
find_path(SLUICE_LIBURING_HEADERS liburing.h)
find_library(SLUICE_LIBURING NAMES liburing.a uring)
