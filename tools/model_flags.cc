#include "tools/model_flags.h"

#include <charconv>
#include <optional>

#include "lib/bytes.h"
#include "lib/text.h"
#include "sluice/errors.h"
#include "sluice/scorer_library.h"
#include "tools/flags.h"

namespace sluice::tools {
namespace {

std::optional<double> parse_share(const std::string& text, const char* flag) {
  if (text == "auto") return std::nullopt;
  double share = 0.0;
  const char* const end = text.data() + text.size();
  const auto [stop, status] = std::from_chars(text.data(), end, share);
  if (status != std::errc{} || stop != end || !(share >= 0.0 && share <= 1.0)) {
    throw Error(
        ErrorCode::usage,
        std::string(flag) + " must be auto or a number from 0 to 1, not " + in_quotes(text));
  }
  return share;
}

}  // namespace

std::optional<std::uint64_t> parse_cap(const std::string& text, const char* flag) {
  if (text.empty()) return std::nullopt;
  return parse_bytes(text, flag);
}

// A size follows the last colon, if what follows begins with a digit and has no slash.
DiskConfig parse_disk(const std::vector<std::string>& values) {
  DiskConfig config;
  std::uint64_t bytes = 0;
  std::size_t sized = 0;
  for (const std::string& value : values) {
    const std::size_t colon = value.rfind(':');
    const std::string size = colon == std::string::npos ? "" : value.substr(colon + 1);
    const bool is_sized =
        !size.empty() && size[0] >= '0' && size[0] <= '9' && size.find('/') == std::string::npos;
    const std::string directory = is_sized ? value.substr(0, colon) : value;
    if (directory.empty()) throw Error(ErrorCode::usage, "--disk names no directory");
    config.directories.emplace_back(directory);
    if (!is_sized) continue;
    bytes += parse_bytes(size, "--disk");
    ++sized;
  }
  if (sized == values.size()) {
    config.bytes = bytes;
  } else if (sized > 0) {
    throw Error(ErrorCode::usage, "--disk: give every directory a size, or none of them");
  }
  return config;
}

CLI::IsMember words_or(std::initializer_list<const char*> words, std::vector<std::string> names) {
  names.insert(names.begin(), words.begin(), words.end());
  return CLI::IsMember(names);
}

void ModelFlags::add_to(CLI::App& app) {
  app.add_option("-m,--model", model,
                 "Hugging Face checkpoint directory, or a GGUF file (of a split one, the first)")
      ->required();
  app.add_option("--device", device, "cpu, cuda or cuda:N, or reference (slow, fp32, for checking)")
      ->capture_default_str();
  app.add_option(
      "--device-memory", device_memory,
      "cap on the device tier, e.g. 64MiB; rows beyond it are streamed through; on a GPU it "
      "covers weights and activations, too. Default: none, rows are attended in host "
      "memory; on a GPU, what is free");
  app.add_option(
      "--host-memory", host_memory,
      "cap on what is in host memory, e.g. 8GiB: rows, and without a GPU weights and activations");
  app.add_option("--disk", disk,
                 "DIR or DIR:SIZE, e.g. /nvme:200GiB: a local directory for rows that "
                 "--host-memory does not hold; several directories are used in turn")
      ->allow_extra_args(false);
  app.add_option("--row-cache", row_cache,
                 "of --device-memory at most this for rows that steps select again and again, 0 "
                 "for none; answers change by rounding at most. Default: what pays");
  app.add_option(
         "--host-attention", host_attention,
         "on a GPU: the share, 0 to 1, of rows in host memory alone that the CPU attends to "
         "in layers that attend to everything. auto: what is fastest; answers may then "
         "differ by rounding from run to run")
      ->capture_default_str();
  app.add_option(
         "--kv-dtype", kv_dtype,
         "type of the KV cache; int8, with a scale for each key and value, has half the bytes "
         "of bf16; k8v4, with values in 4 bits, three eighths at head_dim 128")
      ->check(words_or({}, row_format_names()))
      ->capture_default_str();
  app.add_option("--compute", compute,
                 "element type of matrix products; auto loses nothing of the weights")
      ->check(CLI::IsMember({"auto", "bf16", "f32"}))
      ->capture_default_str();
  app.add_option(
         "--weights", weights,
         "bits of weights: int8 (9 with scales) and int4 (4.5, but Q, K and V in int8) are coded "
         "while loading; auto: as the files have them, elements: decoded")
      ->check(words_or({"auto"}, weight_code_names()))
      ->capture_default_str();
  add_integer(app, "--threads", threads, "threads, 0 for one per core, within the CPU quota")
      ->capture_default_str();
  add_integer(app, "--chunk", chunk,
              "most tokens per prefill step, with prefill=pages at least 128; 0: what suits the "
              "device")
      ->capture_default_str();
}

void ModelFlags::add_scorers_to(CLI::App& app) {
  app.add_option("--scorer", scorers,
                 "a shared library with a scorer of your own, which policies then name "
                 "(sluice/scorer_library.h); its code is run; may be given several times")
      ->allow_extra_args(false);
}

EngineConfig ModelFlags::config() const {
  EngineConfig config;
  config.model = model;
  config.device = device;
  config.threads = threads;
  config.chunk = chunk;
  config.kv_dtype = parse_row_format(kv_dtype, "--kv-dtype");
  if (compute != "auto") config.compute = parse_dtype(compute, "--compute");
  if (weights != "auto") config.weights = parse_weight_code(weights, "--weights");
  config.device_memory = parse_cap(device_memory, "--device-memory");
  config.host_memory = parse_cap(host_memory, "--host-memory");
  if (!disk.empty()) config.disk = parse_disk(disk);
  config.row_cache = parse_cap(row_cache, "--row-cache");
  for (const std::string& file : scorers) config.scorers.add(load_scorer(file));
  config.host_attention = parse_share(host_attention, "--host-attention");
  return config;
}

}  // namespace sluice::tools
