# sluice::sluice is the library that programs link: all folders but the tools. It is their static
# libraries, whose own dependencies a program then links, too; or, with BUILD_SHARED_LIBS, one shared
# library that needs nothing more to be linked.
include(CMakePackageConfigHelpers)

get_property(sluice_folders GLOBAL PROPERTY SLUICE_FOLDERS)
set(SLUICE_SHARED OFF)
if(BUILD_SHARED_LIBS)
  set(SLUICE_SHARED ON)
  list(TRANSFORM sluice_folders REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE sluice_objects)
  add_library(sluice SHARED ${sluice_objects})
  target_link_libraries(sluice PRIVATE ${sluice_folders})
  # What comes from archives, CUDA's runtime, stays inside.
  target_link_options(sluice PRIVATE -Wl,--exclude-libs,ALL)
  target_compile_features(sluice INTERFACE cxx_std_20)
  target_include_directories(sluice INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/lib/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  set_target_properties(sluice PROPERTIES LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  install(TARGETS sluice EXPORT sluiceTargets)
else()
  add_library(sluice INTERFACE)
  target_link_libraries(sluice INTERFACE sluice_model)
  install(TARGETS sluice ${sluice_folders} EXPORT sluiceTargets)
endif()
add_library(sluice::sluice ALIAS sluice)

install(TARGETS sluice_cli)
install(DIRECTORY lib/include/sluice DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT sluiceTargets NAMESPACE sluice:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
export(EXPORT sluiceTargets NAMESPACE sluice:: FILE ${PROJECT_BINARY_DIR}/sluiceTargets.cmake)
configure_package_config_file(cmake/sluiceConfig.cmake.in ${PROJECT_BINARY_DIR}/sluiceConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sluiceConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sluiceConfig.cmake ${PROJECT_BINARY_DIR}/sluiceConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)

# For build systems other than CMake. Static libraries would need more than its words can say.
if(SLUICE_SHARED)
  file(RELATIVE_PATH sluice_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  configure_file(cmake/sluice.pc.in ${PROJECT_BINARY_DIR}/sluice.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/sluice.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
