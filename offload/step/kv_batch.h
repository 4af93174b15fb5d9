// One decode step of several sessions of a pool, a token of each; or of several tokens of one.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "offload/step/decode_step.h"
#include "offload/step/kv_session.h"
#include "sluice/errors.h"

namespace sluice {

class KvBatch {
 public:
  // Throws Error{usage} for sessions of different pools or policies, for one that is there twice,
  // and for more than plan().decode_batch of them; Error{internal} for one that failed earlier, and
  // Error{prompt} or Error{memory} if there is no room; nothing has changed then.
  explicit KvBatch(std::span<KvSession* const> sessions);
  // Begins a step of those sessions whose pages can be read from disk. Returns the error of each
  // that ended because one could not; the others go on, without `batch` if there are none. Throws
  // the other errors of the constructor, with nothing changed but for sessions that ended.
  static std::vector<std::optional<Error>> begin(std::optional<KvBatch>& batch,
                                                 std::span<KvSession* const> sessions);
  // Several tokens of one session, at most decode_room(), each as if it were decoded by itself.
  // takes() must be true. Throws what KvSession::begin() throws.
  KvBatch(KvSession& session, std::int64_t tokens);
  // True if each of the tokens reads only rows that it selects or that are near. Other rows would
  // be fetched for every token; a SoloStep fetches them once.
  static bool takes(const KvSession& session, std::int64_t tokens);
  // Only throws the errors of the first constructor.
  static void require_fit(std::span<KvSession* const> sessions);

  // The recording of earlier steps of the same kind, which can be replayed; null if there were
  // none.
  std::unique_ptr<Recording>& recording();

  // The work of a step, in this order; see DecodeStep.
  Early early(int layer) const { return step_.early(layer); }
  bool selects(int layer) const { return step_.selects(layer); }
  void choose_early(int layer, const Queries& queries) { step_.choose_early(layer, queries); }
  void append(int layer, const NewRows& rows) { step_.append(layer, rows); }
  void attend(int layer, const Queries& queries) { step_.attend(layer, queries); }
  void issue_report() { step_.issue_report(); }

  // Ends the step of every session and waits for the backend; call once all work was issued.
  // Returns an error for each session that failed: that session cannot go on, the others can.
  std::vector<std::optional<Error>> end();

  bool is_recordable() const { return step_.is_recordable(); }
  TokenBatch tokens() const { return step_.batch(); }
  Queue& queue() const { return pool_->queue(); }
  std::int64_t count() const { return step_.batch().count; }

 private:
  std::vector<KvSession*> sessions_;
  KvPool* pool_;
  DecodeStep step_;
};

}  // namespace sluice
