# Settings that every target of Sluice shares.
function(sluice_settings target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF CUDA_STANDARD 20 CUDA_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  set(warnings -Wall -Wextra -Wconversion -Wshadow)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:${warnings};$<$<BOOL:${SLUICE_WERROR}>:-Werror>>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wconversion;$<$<BOOL:${SLUICE_WERROR}>:-Werror=all-warnings>>")
  # GCC 12 reports overlapping copies in std::string's operator+ that do not exist (its bug 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  endif()
  if(SLUICE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${SLUICE_SANITIZE}
                           -fno-omit-frame-pointer -fno-sanitize-recover=all)
    target_link_options(${target} PUBLIC -fsanitize=${SLUICE_SANITIZE})
    # A third of the time to compile: AddressSanitizer reports what most of these would, and the
    # preset ubsan has all of them.
    if(SLUICE_SANITIZE MATCHES address AND SLUICE_SANITIZE MATCHES undefined)
      target_compile_options(${target} PRIVATE -fno-sanitize=null,alignment,object-size,vptr)
    endif()
    # GCC's uninitialised-use analysis reports false positives in instrumented code.
    if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    endif()
  endif()
endfunction()

# Compiles neighbouring sources of a target as one: most of the time goes into headers, which they
# then share. Their anonymous namespaces share their names.
function(sluice_unity target)
  if(NOT SLUICE_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON)
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # Warnings of what neighbours have in common; the preset debug sees those of one source.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage -Wno-shadow -Wshadow=local)
  endif()
endfunction()

# sluice_folder(NAME SOURCES... ): the library of one folder of the project.
function(sluice_folder name)
  add_library(sluice_${name} STATIC ${ARGN})
  sluice_settings(sluice_${name})
  target_include_directories(sluice_${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/lib/include>
           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR})
  sluice_unity(sluice_${name})
  set_property(GLOBAL APPEND PROPERTY SLUICE_FOLDERS sluice_${name})
endfunction()
