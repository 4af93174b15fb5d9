# sluice::sluice is the library that programs link: all folders but the tools.
include(CMakePackageConfigHelpers)

get_property(sluice_folders GLOBAL PROPERTY SLUICE_FOLDERS)
add_library(sluice INTERFACE)
add_library(sluice::sluice ALIAS sluice)
target_link_libraries(sluice INTERFACE sluice_model)

install(TARGETS sluice ${sluice_folders} EXPORT sluiceTargets)
install(TARGETS sluice_cli)
install(DIRECTORY lib/include/sluice DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT sluiceTargets NAMESPACE sluice:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
export(EXPORT sluiceTargets NAMESPACE sluice:: FILE ${PROJECT_BINARY_DIR}/sluiceTargets.cmake)
configure_package_config_file(cmake/sluiceConfig.cmake.in ${PROJECT_BINARY_DIR}/sluiceConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sluiceConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sluiceConfig.cmake ${PROJECT_BINARY_DIR}/sluiceConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
