#include "engine/plan.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "lib/bytes.h"
#include "lib/process_limits.h"
#include "offload/plan/planner.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// oneDNN's generated kernels and the library pages that the first step touches; measured as the
// growth of the process beyond its allocations for the model and the memory of its threads.
constexpr std::uint64_t kFirstUseBytes = std::uint64_t{8} << 20;

// Address space that the first step reserves besides: stacks of threads, and room for libraries and
// the code of products (cpu/dense/onednn.cc). With two threads it takes 70 MiB, with 16 another 68.
std::uint64_t first_use_space(int threads) {
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  return 68 * kMiB + static_cast<std::uint64_t>(threads) * 6 * kMiB;
}

std::uint64_t resident_now() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t total = 0;
  std::uint64_t resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string line(const char* name, std::uint64_t bytes, const std::string& note) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "  %-22s %10s  ", name, format_bytes(bytes).c_str());
  return text.data() + note + "\n";
}

std::string continued(const std::string& note) { return std::string(37, ' ') + note + "\n"; }

// Lines stay within 80 columns at a million tokens.
std::string device_lines(const KvPlan& kv) {
  const auto first = [&](const std::string& note) {
    return line("device tier", kv.device_bytes, note);
  };
  if (kv.in_place) return first("no cap: rows are attended in host memory");
  if (kv.all_resident()) return first("every row is resident");
  const std::size_t dense = kv.dense_layers.size();
  const std::string more =
      dense == 0
          ? ""
          : continued(std::to_string(kv.dense_resident_tokens) + " tokens of " +
                      std::to_string(dense) + (dense == 1 ? " dense layer," : " dense layers,"));
  return first(std::to_string(kv.resident_tokens) + " tokens" +
               (kv.tails ? " and the newest page" : "") + " resident,") +
         more +
         continued((kv.on_disk ? "the rest below, streamed " : "the rest streamed, ") +
                   std::to_string(kv.stream_tokens) + " rows at a time");
}

std::string disk_note(const KvPlan& kv) {
  std::string note;
  if (kv.host_blocks > 0) note = std::to_string(kv.host_blocks * kPageTokens) + " tokens";
  if (kv.host_cache_rows > 0) {
    note += (note.empty() ? "" : ", ") +
            ("a cache of " + std::to_string(kv.host_cache_rows * kv.shape.kv_heads) + " rows");
  }
  return note.empty() ? "on their way to and from the disk" : note;
}

// Bytes of a CPU's device tier that host_bytes does not include.
std::uint64_t beside_host_bytes(const KvPlan& kv) {
  return kv.device_in_host ? 0 : kv.device_bytes;
}

}  // namespace

std::uint64_t program_bytes() { return resident_now() + kFirstUseBytes; }

void require_host_memory(const Plan& plan, std::optional<std::uint64_t> host_cap,
                         std::uint64_t promised, std::uint64_t used, int threads, bool is_here) {
  const std::uint64_t running = plan.host_bytes() + promised;
  const std::uint64_t all = std::max(running, plan.loading_peak_bytes);
  if (host_cap && all > *host_cap) {
    throw Error(
        ErrorCode::memory,
        "`host_memory` " + format_bytes(*host_cap) + " is too small: " +
            (plan.on_device ? ""
                            : "weights take " + format_bytes(plan.weight_bytes) + ", activations " +
                                  format_bytes(plan.activation_bytes) + " and ") +
            "what " + std::to_string(plan.kv.context) + " tokens need " +
            format_bytes(plan.session_host_bytes()) +
            (all > running
                 ? ", and " + format_bytes(plan.loading_bytes) +
                       " are needed to load the weights; give at least " + std::to_string(all) + "B"
                 : "; give at least " + std::to_string(all) + "B or shorten the context"));
  }
  if (!is_here) return;
  const std::uint64_t needed = all - std::min(all, used) +
                               (plan.on_device ? 0 : beside_host_bytes(plan.kv)) + kFirstUseBytes +
                               plan.thread_bytes;
  const std::string remedy = "shorten the context, or raise the limit";
  require_memory(needed, Counted::all, "the plan needs", remedy);
  if (plan.on_device) return;
  require_memory(needed + first_use_space(threads), Counted::reserved, "the plan needs", remedy);
}

std::uint64_t Plan::process_bytes() const {
  const std::uint64_t program = program_bytes + thread_bytes;
  if (on_device) return program + staging_bytes + std::max(loading_bytes, kv.host_bytes);
  const std::uint64_t running =
      activation_bytes + prompt_bytes + kv.host_bytes + beside_host_bytes(kv);
  return program + weight_bytes + std::max(loading_bytes, running);
}

std::string Plan::to_table() const {
  const std::uint64_t rows =
      static_cast<std::uint64_t>(kv.shape.layers) * static_cast<std::uint64_t>(kv.shape.kv_heads);
  const std::string sequences =
      kv.sequences > 1 ? std::to_string(kv.sequences) + " sequences of up to " : "";
  std::string table = "plan for " + sequences + std::to_string(kv.context) + " tokens, " +
                      std::to_string(kv.chunk) + " per step of a prompt\n";
  table += line("rows of one token", kv.shape.token_bytes(),
                std::to_string(rows) + " of " + format_bytes(kv.shape.row_bytes()));
  table += device_lines(kv);
  const std::uint64_t selecting = kv.index_bytes + kv.work_bytes;
  const std::uint64_t compact = DeviceRowBytes(kv).compact;
  const std::uint64_t staged = DeviceRowBytes(kv).prompt;
  const std::uint64_t device = kv.in_place         ? selecting + kv.table_bytes + compact + staged
                               : kv.device_in_host ? kv.device_bytes
                                                   : 0;
  const std::uint64_t others = device + kv.parked_bytes;
  table += line("host: rows", kv.host_bytes - others, kv.on_disk ? disk_note(kv) : "");
  if (kv.on_disk) table += line("disk: rows", kv.disk_bytes, "");
  if (kv.parked_bytes > 0) {
    table += line("host: parked index", kv.parked_bytes, "of sequences that do not step, at most");
  }
  if (selecting > 0) {
    const char* const where = kv.in_place ? "in host memory" : "of the device tier";
    table += line("key index", kv.index_bytes, where);
    table += line("work space to select", kv.work_bytes, where);
    if (compact > 0) table += line("important rows", compact, where);
    if (staged > 0) {
      table += line("a layer's prompt", staged, where);
      table += continued("rows are planned as if all stay; pages that");
      table += continued("evict leaves free go to other sessions");
    }
  }
  if (kv.cache_rows > 0) {
    table +=
        line("row cache", DeviceRowBytes(kv).cache,
             "of the device tier, " + std::to_string(kv.cache_rows * kv.shape.kv_heads) + " rows");
  }
  const std::string where = on_device ? "device: " : "host: ";
  table += line((where + "weights").c_str(), weight_bytes,
                value_basis_bytes == 0
                    ? ""
                    : "with components of values, " + format_bytes(value_basis_bytes));
  table += line((where + "activations").c_str(), activation_bytes, "");
  if (prompt_bytes > 0) {
    table +=
        line((where + "prompt").c_str(), prompt_bytes, "between the layers of a sparse prefill");
  }
  if (on_device) {
    table += line("device: backend", backend_bytes, "scratch of its kernels, recorded steps");
    table += line("device, in all", device_bytes(), "");
  }
  table += line("program", program_bytes, "");
  if (thread_bytes > 0) table += line("threads", thread_bytes, "their stacks and scratch");
  table += line("process, at its peak", process_bytes(), "");
  table += line("dense on the device", kv.dense_bytes(), "what this replaces");
  return table;
}

std::string Plan::to_json() const {
  const nlohmann::json root = {{"context", kv.context},
                               {"chunk", kv.chunk},
                               {"in_place", kv.in_place},
                               {"resident_tokens", kv.resident_tokens},
                               {"dense_layers", kv.dense_layers},
                               {"dense_resident_tokens", kv.dense_resident_tokens},
                               {"tails", kv.tails},
                               {"stream_tokens", kv.stream_tokens},
                               {"compact_rows", kv.compact_rows},
                               {"prompt_rows", kv.prompt_rows},
                               {"cache_rows", kv.cache_rows},
                               {"host_attention", kv.host_attention},
                               {"indexed_tokens", kv.indexed_tokens},
                               {"parked_bytes", kv.parked_bytes},
                               {"index_bytes", kv.index_bytes},
                               {"work_bytes", kv.work_bytes},
                               {"sequences", kv.sequences},
                               {"tokens", kv.tokens},
                               {"table_bytes", kv.table_bytes},
                               {"device_bytes", kv.device_bytes},
                               {"host_rows_bytes", kv.host_bytes},
                               {"on_disk", kv.on_disk},
                               {"disk_bytes", kv.disk_bytes},
                               {"host_blocks", kv.host_blocks},
                               {"host_cache_rows", kv.host_cache_rows},
                               {"device_in_host", kv.device_in_host},
                               {"weight_bytes", weight_bytes},
                               {"value_basis_bytes", value_basis_bytes},
                               {"activation_bytes", activation_bytes},
                               {"prompt_bytes", prompt_bytes},
                               {"loading_bytes", loading_bytes},
                               {"loading_peak_bytes", loading_peak_bytes},
                               {"program_bytes", program_bytes},
                               {"thread_bytes", thread_bytes},
                               {"backend_bytes", backend_bytes},
                               {"staging_bytes", staging_bytes},
                               {"on_device", on_device},
                               {"dense_is_faster", dense_is_faster},
                               {"process_bytes", process_bytes()},
                               {"dense_bytes", kv.dense_bytes()}};
  return root.dump();
}

}  // namespace sluice
