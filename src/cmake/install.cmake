# SPDX-License-Identifier: Apache-2.0
# Library, header, CMake package and pkg-config file, all under component nvte_ep. Every path is relative to the file that
# holds it, so that the tree works wherever it is moved to (a wheel's lies in site-packages).

include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/nvte_ep")
set(pkgconfig_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

install(TARGETS nvte_ep EXPORT nvte_ep_targets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT nvte_ep NAMELINK_COMPONENT nvte_ep)
install(FILES "${NVTE_EP_HEADER}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/nvte_ep" COMPONENT nvte_ep)
install(EXPORT nvte_ep_targets FILE nvte_ep-targets.cmake NAMESPACE nvte_ep::
  DESTINATION "${package_dir}" COMPONENT nvte_ep)

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/nvte_ep-config.cmake.in"
  "${CMAKE_CURRENT_BINARY_DIR}/nvte_ep-config.cmake"
  INSTALL_DESTINATION "${package_dir}" NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/nvte_ep-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/nvte_ep-config.cmake" "${CMAKE_CURRENT_BINARY_DIR}/nvte_ep-config-version.cmake"
  DESTINATION "${package_dir}" COMPONENT nvte_ep)

# pkg-config knows the directory of its file; from there to the prefix is a way that no move changes.
cmake_path(ABSOLUTE_PATH pkgconfig_dir BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}" OUTPUT_VARIABLE pkgconfig_full_dir)
file(RELATIVE_PATH PKGCONFIG_TO_PREFIX "${pkgconfig_full_dir}" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" PKGCONFIG_TO_PREFIX "${PKGCONFIG_TO_PREFIX}")
file(RELATIVE_PATH PKGCONFIG_LIBDIR "${CMAKE_INSTALL_PREFIX}" "${CMAKE_INSTALL_FULL_LIBDIR}")
file(RELATIVE_PATH PKGCONFIG_INCLUDEDIR "${CMAKE_INSTALL_PREFIX}" "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
configure_file("${CMAKE_CURRENT_LIST_DIR}/nvte_ep.pc.in" "${CMAKE_CURRENT_BINARY_DIR}/nvte_ep.pc" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/nvte_ep.pc" DESTINATION "${pkgconfig_dir}" COMPONENT nvte_ep)
