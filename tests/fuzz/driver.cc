// Runs a fuzzer without libFuzzer, in a child process. The parent watches it and keeps the input
// that ended it.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <new>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/run.h"
#include "tests/support/temp_dir.h"

namespace sluice::fuzz {
namespace {

// In memory if the machine has a memory file system.
std::filesystem::path parent_folder() {
  return ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : std::filesystem::temp_directory_path();
}

// Never unmapped, because both processes use it until they end.
Current& shared_current() {
  void* const memory =
      ::mmap(nullptr, sizeof(Current), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "there is memory for an input");
  return *new (memory) Current;
}

std::string describe(int status) {
  if (WIFSIGNALED(status)) return std::string("signal ") + ::strsignal(WTERMSIG(status));
  return "status " + std::to_string(WEXITSTATUS(status));
}

int report_finding(const Options& options, const Current& current, int status) {
  const std::string file = options.name + "-" + std::to_string(options.seed) + "-" +
                           std::to_string(current.runs) + ".input";
  write_file(file, current.input());
  std::fprintf(stderr,
               "%s: FOUND after %llu runs with seed %llu: the process ended with %s.\nThe last "
               "input is in %s; repeat it with: %s_fuzz --input %s\n",
               options.name.c_str(), static_cast<unsigned long long>(current.runs),
               static_cast<unsigned long long>(options.seed), describe(status).c_str(),
               std::filesystem::absolute(file).c_str(), options.name.c_str(), file.c_str());
  return EXIT_FAILURE;
}

// The exit status of `work` in a child process. The child leaves the folder for the parent to
// remove.
int status_of(const std::function<void()>& work) {
  const pid_t child = ::fork();
  require(child >= 0, "a process can be started");
  if (child == 0) {
    work();
    std::exit(EXIT_SUCCESS);  // runs the leak check
  }
  int status = 0;
  require(::waitpid(child, &status, 0) == child, "a process can be waited for");
  return status;
}

int fuzz(const Options& options) {
  Current& current = shared_current();
  const int status = status_of([&] {
    require(run(options, current), "some changed inputs are accepted and some are refused");
  });
  return status == 0 ? EXIT_SUCCESS : report_finding(options, current, status);
}

int read_once(const std::filesystem::path& path, const std::filesystem::path& folder) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), "the input can be opened");
  const std::string input(std::istreambuf_iterator<char>(file), {});
  const int status = status_of([&] { run_input(input, folder, shared_current()); });
  return status == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace sluice::fuzz

int main(int argc, char** argv) {
  sluice::fuzz::Options options;
  std::filesystem::path input;
  CLI::App app("Reads changed inputs until one gets no proper answer.");
  app.add_option("--seed", options.seed, "of the changes")->capture_default_str();
  app.add_option("--runs", options.runs, "changed inputs; 0: until the seconds are over")
      ->capture_default_str();
  app.add_option("--seconds", options.seconds, "to run, without --runs")->capture_default_str();
  app.add_option("--max-length", options.max_length, "most bytes of a changed input")
      ->capture_default_str()
      ->check(CLI::Range(std::size_t{1}, sluice::fuzz::kMaxLength));
  auto* const corpus = app.add_option("corpus", options.corpus, "folder of inputs to begin with")
                           ->check(CLI::ExistingDirectory);
  auto* const file = app.add_option("--input", input, "a file to read once instead");
  corpus->excludes(file);
  CLI11_PARSE(app, argc, argv);
  if (corpus->empty() && file->empty()) return app.exit(CLI::RequiredError("corpus or --input"));

  const sluice::testing::TempDir folder(sluice::fuzz::parent_folder());
  options.folder = folder.path();
  options.name = (options.corpus / "").parent_path().filename().string();
  return input.empty() ? sluice::fuzz::fuzz(options)
                       : sluice::fuzz::read_once(input, folder.path());
}
