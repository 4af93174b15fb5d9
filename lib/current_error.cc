#include "lib/current_error.h"

#include <exception>
#include <new>

namespace sluice {

Error current_error(const std::string& what) {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::memory, what + "this machine is out of memory");
  } catch (const std::exception& error) {
    return Error(ErrorCode::internal, what + error.what());
  } catch (...) {
    return Error(ErrorCode::internal, what + "a callback threw");
  }
}

}  // namespace sluice
