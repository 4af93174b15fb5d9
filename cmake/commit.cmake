# Writes a source file that names the commit of the sources, if they are in a git checkout:
#   cmake -DSOURCE=DIR -DOUT=FILE -P commit.cmake
# The file is only touched when the commit changes, so that nothing is compiled again.
set(commit "")
find_program(git git)
if(git AND EXISTS "${SOURCE}/.git")
  execute_process(COMMAND ${git} -C ${SOURCE} describe --always --dirty --abbrev=40 --exclude=*
                  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(text "#include \"tools/run_record.h\"\n
namespace sluice::tools {
std::string_view source_commit() { return \"${commit}\"; }
}  // namespace sluice::tools\n")
set(before "")
if(EXISTS "${OUT}")
  file(READ "${OUT}" before)
endif()
if(NOT before STREQUAL text)
  file(WRITE "${OUT}" "${text}")
endif()
