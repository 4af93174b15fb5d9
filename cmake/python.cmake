# Decides if the Python package is built (SLUICE_PYTHON_FOUND): it needs nanobind and Python's
# headers. scripts/setup.sh --python installs nanobind into build/python.
set(SLUICE_PYTHON AUTO CACHE STRING "Build the Python package: AUTO (with the tests, if nanobind is there), ON or OFF")
set_property(CACHE SLUICE_PYTHON PROPERTY STRINGS AUTO ON OFF)

set(SLUICE_PYTHON_FOUND OFF)
# A sanitizer's runtime would have to be loaded before the interpreter.
if(SLUICE_PYTHON STREQUAL "ON" OR (SLUICE_PYTHON STREQUAL "AUTO" AND SLUICE_TESTS AND NOT SLUICE_SANITIZE))
  set(own_python ${PROJECT_SOURCE_DIR}/build/python/bin/python3)
  if(NOT Python_EXECUTABLE AND EXISTS ${own_python})
    set(Python_EXECUTABLE ${own_python})
  endif()
  find_package(Python 3.9 COMPONENTS Interpreter Development.Module)
  if(Python_FOUND)
    execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
      OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_package(nanobind CONFIG)
  endif()
  if(nanobind_FOUND)
    set(SLUICE_PYTHON_FOUND ON)
  elseif(SLUICE_PYTHON STREQUAL "ON")
    message(FATAL_ERROR "SLUICE_PYTHON=ON needs Python's headers and nanobind: scripts/setup.sh --python")
  else()
    message(WARNING "The Python package is not built and NOT TESTED: no Python headers or no nanobind; scripts/setup.sh --python installs both")
  endif()
endif()
message(STATUS "Python package: ${SLUICE_PYTHON_FOUND}")
