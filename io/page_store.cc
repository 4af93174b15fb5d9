#include "io/page_store.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <future>
#include <iterator>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "io/pool_disk.h"
#include "io/spill_file.h"
#include "lib/bytes.h"
#include "lib/check.h"
#include "lib/current_error.h"

namespace sluice {
namespace {

[[noreturn]] void throw_usage(const std::string& message) {
  throw Error(ErrorCode::usage, "page store: " + message);
}

// Before anything is allocated or multiplied without a check.
void require_sensible(const PageStoreConfig& config) {
  const auto is_sectors = [](std::uint64_t bytes) {
    return bytes > 0 && bytes % kSectorBytes == 0;
  };
  constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 60;
  if (config.directories.empty()) throw_usage("no directory is named");
  if (config.directories.size() > 64) throw_usage("more than 64 directories");
  if (!is_sectors(config.region_bytes) || !is_sectors(config.stripe_bytes)) {
    throw_usage("regions and stripes are multiples of 4096 bytes");
  }
  if (config.regions == 0 || config.regions > kMaxBytes / config.region_bytes ||
      config.stripe_bytes > kMaxBytes) {
    throw_usage("no regions, or more than 2^60 bytes of them");
  }
  if (config.limits.depth < 2 || config.limits.depth > 4096) {
    throw_usage("2 to 4096 operations can be in flight");
  }
  if (config.limits.bytes_in_flight < 2 * kMaxOperationBytes) {
    throw_usage("at least " + format_bytes(2 * kMaxOperationBytes) + " have to be in flight");
  }
}

constexpr std::size_t kFileThreads = 4;  // that read a PageFile

std::uint64_t random_number() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

}  // namespace

// One file and the requests on their way to it. All but run() is called by any thread.
class PageStore::Lane {
 public:
  // In errors.
  struct Name {
    std::string disk;
    std::string file;
  };

  // `make` makes the disk, on the thread of run(), and keeps its file.
  Lane(Name name, std::string description, DiskLimits limits, std::shared_ptr<DiskWatch> watch,
       std::shared_ptr<const SectorCheck> sums, std::function<std::unique_ptr<Disk>()> make)
      : name_(std::move(name)),
        description_(std::move(description)),
        make_(std::move(make)),
        limits_(limits),
        watch_(std::move(watch)),
        sums_(std::move(sums)) {}

  // Call before run(), in the same thread.
  void open() {
    disk_ = make_();
    check(disk_ != nullptr, "page store: the factory made no disk");
  }

  // Serves requests until stop() was called and all are done.
  void run() {
    DiskQueue queue(*disk_, *sums_, name_.disk, limits_, watch_.get(), name_.file);
    try {
      while (take(queue)) queue.step(true);
    } catch (const Error& error) {
      {
        const std::lock_guard lock(mutex_);
        dead_ = error;
      }
      take(queue);
      queue.abandon(error);
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    disk_->wake();
  }

  void add(std::vector<DiskRequest> requests) {
    bool wakes = false;
    {
      const std::lock_guard lock(mutex_);
      if (!dead_) {
        std::move(requests.begin(), requests.end(), std::back_inserter(incoming_));
        requests.clear();
        wakes = std::exchange(sleeps_, false);
      }
    }
    if (wakes) disk_->wake();
    for (const DiskRequest& request : requests) fail(request, *dead_);
  }

  const std::string& description() const { return description_; }
  DiskCounts counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  // Takes what has come in. Returns false once there is nothing left to do, ever.
  bool take(DiskQueue& queue) {
    {
      const std::lock_guard lock(mutex_);
      counts_ = queue.counts();
      std::swap(taken_, incoming_);
      sleeps_ = true;
      if (stops_ && taken_.empty() && queue.idle()) return false;
    }
    for (DiskRequest& request : taken_) add_or_fail(queue, request);
    taken_.clear();
    return true;
  }
  static void add_or_fail(DiskQueue& queue, DiskRequest& request) {
    try {
      queue.add(std::move(request));
    } catch (const std::bad_alloc&) {  // before anything was moved
      fail(request, current_error());
    }
  }
  static void fail(const DiskRequest& request, const Error& error) {
    request.batch->fail(request.place, error);
    request.batch->finish_part();
  }

  Name name_;
  std::string description_;
  std::function<std::unique_ptr<Disk>()> make_;  // keeps the file open
  DiskLimits limits_;
  std::shared_ptr<DiskWatch> watch_;
  std::shared_ptr<const SectorCheck> sums_;
  std::unique_ptr<Disk> disk_;  // before run() ends only wake() is called from outside
  mutable std::mutex mutex_;
  std::vector<DiskRequest> incoming_;
  std::vector<DiskRequest> taken_;  // the thread's own
  std::optional<Error> dead_;       // the device failed for good; never changes again
  DiskCounts counts_;
  bool sleeps_ = false;  // the thread sleeps or is about to: wake it
  bool stops_ = false;
};

// A lane and its thread, which outlives this object if the disk was given up.
class PageStore::LaneThread {
 public:
  LaneThread(std::shared_ptr<Lane> lane, std::shared_ptr<DiskWatch> watch)
      : lane_(std::move(lane)), watch_(std::move(watch)) {
    std::promise<void> ready;
    std::future<void> is_ready = ready.get_future();
    const auto body = [&, own = lane_] {
      try {
        own->open();
      } catch (...) {
        ready.set_exception(std::current_exception());
        return;
      }
      ready.set_value();  // after which only the lane is there
      own->run();
    };
    try {
      thread_ = std::thread(body);
      is_ready.get();
    } catch (const std::system_error& error) {
      if (thread_.joinable()) thread_.join();
      throw Error(ErrorCode::io, "the thread that reads the disk cannot be started: " +
                                     std::string(error.what()) + "; raise the limit ('ulimit -u')");
    } catch (...) {
      thread_.join();
      throw;
    }
  }
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  ~LaneThread() {
    lane_->stop();
    watch_->is_given_up() ? thread_.detach() : thread_.join();
  }

  Lane* operator->() const { return lane_.get(); }

 private:
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<DiskWatch> watch_;
  std::thread thread_;
};

PageStore::PageStore(const PageStoreConfig& config)
    : region_bytes_(config.region_bytes),
      total_bytes_(0),
      stripe_bytes_(config.stripe_bytes),
      arenas_(config.arenas),
      limits_(config.limits) {
  require_sensible(config);
  total_bytes_ = config.regions * config.region_bytes;
  const std::uint64_t bytes = bytes_per_directory(config);
  std::vector<SpillFile> files;
  for (const std::filesystem::path& directory : config.directories) {
    files.push_back(SpillFile::create(directory, bytes));
  }
  watch_ = std::make_shared<DiskWatch>(config.patience, config.directories.front().string());
  sums_ =
      std::make_shared<SectorSums>(config.regions, region_bytes_ / kSectorBytes, random_number());
  for (SpillFile& file : files) {
    DiskFactory factory = config.factory;
    std::string description = file.directory().string() + ": a device of the caller";
    if (!factory) {
      DiskMode mode = choose_disk_mode(file, config.access, config.limits);
      factory = factory_of(mode.access);
      description = std::move(mode.description);
    }
    const auto opened = std::make_shared<SpillFile>(std::move(file));
    const auto make = [opened, factory, limits = limits_, arenas = arenas_] {
      return factory(*opened, limits, arenas);
    };
    auto lane = std::make_shared<Lane>(Lane::Name{opened->directory().string(), "the spill file"},
                                       std::move(description), limits_, watch_, sums_, make);
    lanes_.push_back(std::make_unique<LaneThread>(std::move(lane), watch_));
  }
}

PageStore::~PageStore() = default;

std::uint64_t PageStore::memory_bytes(const PageStoreConfig& config) {
  require_sensible(config);
  constexpr std::uint64_t kPerOperation = 1024;  // a slot of DiskQueue with a few requests
  return SectorSums::memory_bytes(config.regions, config.region_bytes / kSectorBytes) +
         config.directories.size() * config.limits.depth * kPerOperation;
}

std::uint64_t PageStore::bytes_per_directory(const PageStoreConfig& config) {
  require_sensible(config);
  const std::uint64_t total = config.regions * config.region_bytes;
  const std::uint64_t stripes = (total + config.stripe_bytes - 1) / config.stripe_bytes;
  const std::uint64_t files = config.directories.size();
  if (files == 1) return total;
  return (stripes + files - 1) / files * config.stripe_bytes;
}

void PageStore::check_request(std::uint64_t address, const std::byte* data,
                              std::size_t bytes) const {
  check(address % kSectorBytes == 0 && bytes % kSectorBytes == 0 &&
            reinterpret_cast<std::uintptr_t>(data) % kSectorBytes == 0,
        "page store: a request that is not of whole, aligned sectors");
  check(bytes > 0 && address < total_bytes_ && bytes <= total_bytes_ - address &&
            address / region_bytes_ == (address + bytes - 1) / region_bytes_,
        "page store: a request outside a region");
}

// Cuts a request where a stripe ends, unless there is only one file, and where it would be larger
// than one operation may be.
void PageStore::split(DiskRequest request, std::uint64_t address, std::size_t bytes,
                      Parts& parts) const {
  const std::uint64_t files = lanes_.size();
  while (bytes > 0) {
    std::uint64_t part = std::min<std::uint64_t>(bytes, kMaxOperationBytes);
    if (files > 1) part = std::min(part, stripe_bytes_ - address % stripe_bytes_);
    const std::uint64_t stripe = address / stripe_bytes_;
    request.offset = stripe / files * stripe_bytes_ + address % stripe_bytes_;
    request.sector = address / kSectorBytes;
    request.bytes = static_cast<std::size_t>(part);
    parts[stripe % files].push_back(request);
    request.data += part;
    address += part;
    bytes -= request.bytes;
  }
}

void PageStore::split_file(DiskRequest request, const PageRead& read, FileParts& parts) {
  std::uint64_t address = read.address;
  std::size_t bytes = read.destination.size();
  check(address % kSectorBytes == 0 && bytes % kSectorBytes == 0 && bytes > 0 &&
            address <= read.file->bytes() && bytes <= read.file->bytes() - address,
        "page store: a request outside a file");
  while (bytes > 0) {
    request.bytes = std::min<std::size_t>(bytes, kMaxOperationBytes);
    request.offset = read.file->first_ + address;
    request.sector = address / kSectorBytes;
    parts[read.file].push_back(request);
    request.data += request.bytes;
    address += request.bytes;
    bytes -= request.bytes;
  }
}

DiskTicket PageStore::submit(Parts parts, std::size_t requests, FileParts of_files) {
  std::size_t count = 0;
  for (const auto& [file, its] : of_files) count += its.size();
  for (const auto& its : parts) count += its.size();
  auto batch = std::make_shared<DiskBatch>(count, requests, watch_);
  if (watch_->is_given_up()) {
    DiskTicket refused(std::move(batch));
    refused.failures();  // ends it
    return refused;
  }
  const auto hand_over = [&](std::vector<DiskRequest> to, LaneThread& lane) {
    if (to.empty()) return;
    // Neighbours have to stand side by side to be merged.
    std::stable_sort(to.begin(), to.end(),
                     [](const auto& a, const auto& b) { return a.offset < b.offset; });
    for (DiskRequest& request : to) request.batch = batch;
    lane->add(std::move(to));
  };
  for (std::size_t i = 0; i < lanes_.size(); ++i) hand_over(std::move(parts[i]), *lanes_[i]);
  for (auto& [file, its] : of_files) hand_over(std::move(its), *file->lane_);
  return DiskTicket(std::move(batch));
}

DiskTicket PageStore::read(std::span<const PageRead> reads, DiskPriority priority) {
  Parts parts(lanes_.size());
  DiskRequest request;
  request.priority = priority;
  FileParts of_files;
  for (const PageRead& one : reads) {
    if (one.file != nullptr) {
      request.data = one.destination.data();
      split_file(request, one, of_files);
      ++request.place;
      continue;
    }
    check_request(one.address, one.destination.data(), one.destination.size());
    request.data = one.destination.data();
    split(request, one.address, one.destination.size(), parts);
    ++request.place;
  }
  return submit(std::move(parts), reads.size(), std::move(of_files));
}

DiskTicket PageStore::write(std::span<const PageWrite> writes, DiskPriority priority) {
  Parts parts(lanes_.size());
  DiskRequest request;
  request.action = DiskAction::write;
  request.priority = priority;
  for (const PageWrite& one : writes) {
    check_request(one.address, one.source.data(), one.source.size());
    sums_->set(one.address / kSectorBytes, one.source);
    // iovec has no const; a write only reads.
    request.data = const_cast<std::byte*>(one.source.data());
    split(request, one.address, one.source.size(), parts);
    ++request.place;
  }
  return submit(std::move(parts), writes.size());
}

DiskTicket PageStore::flush() {
  Parts parts(lanes_.size());
  DiskRequest request;
  request.action = DiskAction::flush;
  for (auto& requests : parts) requests.push_back(request);
  return submit(std::move(parts), 1);
}

std::shared_ptr<PageFile> PageStore::open(File file, std::uint64_t first,
                                          std::shared_ptr<SavedSums> sums) {
  const auto opened = std::make_shared<File>(std::move(file));
  // Through the page cache: a saved session was often written a moment ago.
  const auto make = [opened, depth = limits_.depth] {
    return std::make_unique<PoolDisk>(opened->descriptor(), depth, kFileThreads);
  };
  auto lane = std::make_shared<Lane>(Lane::Name{opened->path().string(), "the file"},
                                     opened->path().string(), limits_, watch_, sums, make);
  return std::make_shared<PageFile>(std::make_unique<LaneThread>(std::move(lane), watch_), first,
                                    std::move(sums));
}

PageFile::PageFile(std::unique_ptr<PageStore::LaneThread> lane, std::uint64_t first,
                   std::shared_ptr<SavedSums> sums)
    : lane_(std::move(lane)), first_(first), sums_(std::move(sums)) {
  check(first_ % kSectorBytes == 0, "page store: a file whose pages begin within a sector");
}

PageFile::~PageFile() = default;

std::uint64_t PageFile::bytes() const { return sums_->sectors() * kSectorBytes; }

void PageStore::forget(std::uint64_t region) { sums_->forget(region); }

std::vector<std::string> PageStore::descriptions() const {
  std::vector<std::string> lines;
  for (const auto& lane : lanes_) lines.push_back((*lane)->description());
  return lines;
}

DiskCounts PageStore::counts() const {
  DiskCounts total;
  for (const auto& lane : lanes_) {
    const DiskCounts counts = (*lane)->counts();
    total.requests += counts.requests;
    total.failures += counts.failures;
    total.operations += counts.operations;
    total.retries += counts.retries;
    total.read_bytes += counts.read_bytes;
    total.written_bytes += counts.written_bytes;
  }
  return total;
}

}  // namespace sluice
