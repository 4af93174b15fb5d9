# sluice::sluice is the library that programs link: all folders except the tools. Without
# BUILD_SHARED_LIBS it is their static libraries, and programs link the dependencies of these, too.
# With it, it is one shared library that needs nothing more to be linked, and one of the CUDA
# backend, loaded when a program asks for that.
include(CMakePackageConfigHelpers)

# sluice_shared(NAME FOLDERS...): a shared library from folders' objects.
function(sluice_shared name)
  list(TRANSFORM ARGN REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  add_library(${name} SHARED ${objects})
  # Symbols from archives (CUDA's runtime) stay hidden.
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION}
    SOVERSION ${SLUICE_SOVERSION} INSTALL_RPATH $ORIGIN)
endfunction()

get_property(sluice_folders GLOBAL PROPERTY SLUICE_FOLDERS)
set(SLUICE_SHARED OFF)
if(BUILD_SHARED_LIBS)
  set(SLUICE_SHARED ON)
  list(REMOVE_ITEM sluice_folders sluice_kernels)
  sluice_shared(sluice ${sluice_folders})
  target_link_libraries(sluice PRIVATE ${sluice_folders} ${CMAKE_DL_LIBS})
  if(SLUICE_CUDA_FOUND)
    sluice_shared(sluice_cuda sluice_kernels)
    target_sources(sluice_cuda PRIVATE kernels/cuda_module.cc)
    target_include_directories(sluice_cuda PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_features(sluice_cuda PRIVATE cxx_std_20)
    target_link_libraries(sluice_cuda PRIVATE sluice CUDA::cudart_static ${CMAKE_DL_LIBS})
    install(TARGETS sluice_cuda LIBRARY NAMELINK_SKIP)
  endif()
  target_compile_features(sluice INTERFACE cxx_std_20)
  target_include_directories(sluice INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/lib/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  install(TARGETS sluice EXPORT sluiceTargets)
else()
  add_library(sluice INTERFACE)
  target_link_libraries(sluice INTERFACE sluice_engine)
  install(TARGETS sluice ${sluice_folders} EXPORT sluiceTargets)
endif()
add_library(sluice::sluice ALIAS sluice)

install(TARGETS sluice_cli)
install(DIRECTORY lib/include/sluice DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(PROGRAMS bench/plot_bench.py bench/plot_eval.py
  DESTINATION ${CMAKE_INSTALL_DATADIR}/sluice)
install(DIRECTORY examples/scorer DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples)
install(EXPORT sluiceTargets NAMESPACE sluice:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
export(EXPORT sluiceTargets NAMESPACE sluice:: FILE ${PROJECT_BINARY_DIR}/sluiceTargets.cmake)
configure_package_config_file(cmake/sluiceConfig.cmake.in ${PROJECT_BINARY_DIR}/sluiceConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sluiceConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sluiceConfig.cmake ${PROJECT_BINARY_DIR}/sluiceConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)

# The C interface has a package of its own, which C programs find without C++ and without the
# packages that the static libraries need.
install(TARGETS sluice_c EXPORT sluice_cTargets)
install(FILES bindings/c/sluice.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT sluice_cTargets NAMESPACE sluice:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice_c)
configure_package_config_file(cmake/sluice_cConfig.cmake.in ${PROJECT_BINARY_DIR}/sluice_cConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice_c)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sluice_cConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sluice_cConfig.cmake
  ${PROJECT_BINARY_DIR}/sluice_cConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice_c)
file(RELATIVE_PATH sluice_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file(cmake/sluice_c.pc.in ${PROJECT_BINARY_DIR}/sluice_c.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/sluice_c.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# For build systems other than CMake. pkg-config cannot express the needs of the static libraries.
if(SLUICE_SHARED)
  configure_file(cmake/sluice.pc.in ${PROJECT_BINARY_DIR}/sluice.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/sluice.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
