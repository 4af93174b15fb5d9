#include "engine/loader.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "engine/run_together.h"
#include "lib/bytes.h"
#include "lib/process_limits.h"
#include "lib/weight_code.h"

namespace sluice {
namespace {

// Bytes per read. For a GPU, long enough that the copy takes far longer than its launch; for a CPU,
// short enough to be still in the L2 cache when it is packed.
std::int64_t piece_bytes(const Backend& backend, const ReadOptions& options) {
  if (options.piece_bytes > 0) return options.piece_bytes;
  return std::int64_t{backend.info().synchronous ? 1 : 4} << 20;
}

constexpr int kMaxReaders = 16;
constexpr std::uint64_t kSlotAlignment = 64;

// Rows [first, first + rows) of a group, all of one format.
struct Piece {
  const TensorPlace* place;
  WeightFormat format;  // as they are read
  std::int64_t first;
  std::int64_t rows;

  // A row of vectors is one element.
  std::int64_t columns() const { return std::max<std::int64_t>(place->group->columns, 1); }
  std::size_t bytes_of(std::int64_t count) const {
    return static_cast<std::size_t>(count) * format.row_bytes(columns());
  }
  std::size_t bytes() const { return bytes_of(rows); }
};

// Returns true if the loader or the backend finds codes for the piece's elements.
bool is_coded_here(const Piece& piece) {
  return piece.place->format.is_coded() && !piece.format.is_coded();
}

// All pieces, in the order of the places.
class Pieces {
 public:
  Pieces(const Checkpoint& checkpoint, const Backend& backend, std::span<const TensorPlace> places,
         const ReadOptions& options)
      : checkpoint_(&checkpoint), backend_(&backend), bytes_(piece_bytes(backend, options)) {
    for (const TensorPlace& place : places) add(place);
  }

  const std::vector<Piece>& all() const { return all_; }

  // Bytes in which a reader codes rows.
  std::uint64_t coding_bytes() const {
    if (backend_->info().codes_weights) return 0;
    std::int64_t most = 0;
    for (const Piece& piece : all_) {
      if (is_coded_here(piece)) most = std::max(most, piece.columns());
    }
    return static_cast<std::uint64_t>(most) * sizeof(float);
  }

  // Bytes of the largest piece.
  std::uint64_t most_bytes() const {
    std::uint64_t most = 0;
    for (const Piece& piece : all_) most = std::max<std::uint64_t>(most, piece.bytes());
    return most;
  }

 private:
  void add(const TensorPlace& place) {
    const TensorGroup& group = *place.group;
    if (place.has_codes) return divide({&place, place.format, 0, group.rows()});
    if (group.columns > 0) return divide({&place, dtype_of(group.parts.front()), 0, group.rows()});
    // The vectors of a group may differ in dtype, so each is divided by itself.
    std::int64_t first = 0;
    for (const NamedRows& part : group.parts) {
      divide({&place, dtype_of(part), first, part.rows});
      first += part.rows;
    }
  }

  // Adds the pieces that make up `whole`, which may be of any length.
  void divide(const Piece& whole) {
    const std::int64_t block =
        whole.place->group->columns > 0 ? backend_->weight_rows(whole.place->format) : 1;
    const auto block_bytes = static_cast<std::int64_t>(whole.bytes_of(block));
    const std::int64_t most = std::max<std::int64_t>(bytes_ / block_bytes, 1) * block;
    const std::int64_t end = whole.first + whole.rows;
    for (std::int64_t first = whole.first; first < end; first += most) {
      all_.push_back({whole.place, whole.format, first, std::min(most, end - first)});
    }
  }

  DType dtype_of(const NamedRows& part) const { return checkpoint_->info(part.name).dtype.value(); }

  const Checkpoint* checkpoint_;
  const Backend* backend_;
  std::int64_t bytes_;
  std::vector<Piece> all_;
};

// A thread reads into one slot while another is copied from.
std::size_t slot_count(const Backend& backend) { return backend.info().synchronous ? 1 : 2; }

// Bytes of a slot.
std::size_t slot_bytes(const Pieces& pieces) {
  return round_up(pieces.most_bytes(), kSlotAlignment);
}

// Bytes of one thread's slots, and of its scratch after them.
std::size_t staging_bytes(const Pieces& pieces, const Backend& backend) {
  return slot_bytes(pieces) * slot_count(backend) + round_up(pieces.coding_bytes(), kSlotAlignment);
}

// Moves pieces from the files to their places; one per thread.
class Reader {
 public:
  // `staging`: host memory of staging_bytes().
  Reader(const Checkpoint& checkpoint, Backend& backend, const Pieces& pieces, std::byte* staging)
      : checkpoint_(&checkpoint), codes_weights_(backend.info().codes_weights) {
    const std::size_t bytes = slot_bytes(pieces);
    for (std::size_t i = 0; i < slot_count(backend); ++i, staging += bytes) {
      slots_.push_back({staging, backend.make_queue({.computes = false})});
    }
    coding_ = reinterpret_cast<float*>(staging);
  }

  void take(const Piece& piece) {
    const Slot& slot = slots_[turn_++ % slots_.size()];
    slot.queue->synchronize();
    read(piece, slot.staging);
    send(piece, slot);
  }

  // Waits for all copies.
  void finish() {
    for (const Slot& slot : slots_) slot.queue->synchronize();
  }

 private:
  struct Slot {
    std::byte* staging;
    std::unique_ptr<Queue> queue;  // of copies from `staging`
  };

  // Reads from the parts of the group that the piece has rows of.
  void read(const Piece& piece, std::byte* to) const {
    std::int64_t part_first = 0;
    for (const NamedRows& part : piece.place->group->parts) {
      const std::int64_t first = std::max(piece.first, part_first);
      const std::int64_t end = std::min(piece.first + piece.rows, part_first + part.rows);
      if (first < end) {
        const std::span destination(to, piece.bytes_of(end - first));
        if (piece.format.is_coded()) {
          checkpoint_->read_codes(part.name, first - part_first, piece.format.code, destination);
        } else {
          checkpoint_->read(part.name, piece.bytes_of(first - part_first), destination);
        }
        to += destination.size();
      }
      part_first += part.rows;
    }
  }

  void send(const Piece& piece, const Slot& slot) const {
    const TensorPlace& place = *piece.place;
    const std::int64_t columns = piece.columns();
    if (place.weight != nullptr) {
      WeightRows rows = {slot.staging, piece.format, piece.rows, columns};
      if (is_coded_here(piece) && !codes_weights_) rows = encode_rows(rows, place.format, coding_);
      slot.queue->run(WriteWeightParams{place.weight, piece.first, rows});
      return;
    }
    const DType dtype = place.format.element;
    std::byte* const to =
        place.memory + static_cast<std::size_t>(piece.first * columns) * size_of(dtype);
    const DType stored = piece.format.element;
    if (stored == dtype) {
      const CopyOp op = {to, slot.staging, piece.bytes()};
      slot.queue->copy({&op, 1});
    } else {
      const std::int64_t count = piece.rows * columns;
      slot.queue->run(
          CastParams{{slot.staging, stored, 1, count, count}, {to, dtype, 1, count, count}});
    }
  }

  const Checkpoint* checkpoint_;
  bool codes_weights_;  // the backend does
  std::vector<Slot> slots_;
  float* coding_ = nullptr;  // a row that is being coded
  std::size_t turn_ = 0;
};

}  // namespace

int reader_count(int threads) {
  return std::clamp(threads > 0 ? threads : process_limits().threads(), 1, kMaxReaders);
}

std::uint64_t reading_bytes(const Checkpoint& checkpoint, const Backend& backend,
                            std::span<const TensorPlace> places, const ReadOptions& options) {
  const Pieces pieces(checkpoint, backend, places, options);
  return (staging_bytes(pieces, backend) + checkpoint.scratch_bytes()) *
         static_cast<std::uint64_t>(options.readers);
}

void read_tensors(const Checkpoint& checkpoint, Backend& backend,
                  std::span<const TensorPlace> places, const ReadOptions& options,
                  const std::function<void(double)>& progress) {
  const Pieces pieces(checkpoint, backend, places, options);
  const std::size_t count = pieces.all().size();
  const auto readers = static_cast<std::size_t>(options.readers);
  const std::size_t bytes = staging_bytes(pieces, backend);
  const Buffer staging = backend.allocate(Tier::host, readers * bytes);
  std::vector<Reader> all;
  for (std::size_t i = 0; i < readers; ++i) {
    all.emplace_back(checkpoint, backend, pieces, staging.data() + i * bytes);
  }
  std::atomic<std::size_t> next = 0;
  const auto work = [&](std::size_t reader) {
    for (std::size_t i = next++; i < count; i = next++) {
      if (reader == 0 && progress) progress(static_cast<double>(i) / static_cast<double>(count));
      all[reader].take(pieces.all()[i]);
    }
    all[reader].finish();
  };
  run_together(readers, work, [&] { next = count; });
  if (progress) progress(1.0);
}

}  // namespace sluice
