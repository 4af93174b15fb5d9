// A step of one session, layer by layer: a chunk of a prompt, a correction, or a few known tokens.
#pragma once

#include <cstdint>

#include "offload/step/decode_step.h"
#include "offload/step/kv_session.h"
#include "offload/step/token_run.h"
#include "sluice/ledger.h"

namespace sluice {

class SoloStep {
 public:
  // Throws Error{usage} for a number of tokens that the plan or the phase does not take, and what
  // KvSession::begin() throws; nothing has changed then.
  SoloStep(KvSession& session, Phase phase, std::int64_t tokens);

  // In decode steps, see DecodeStep; none in others.
  Early early(int layer) const { return is_run_ ? Early::none : decode_.early(layer); }
  bool selects(int layer) const { return decode_.selects(layer); }
  void choose_early(int layer, const Queries& queries);
  // Every layer is appended, and attended right after it. Throws Error{usage} and changes nothing
  // otherwise; after an error in the work itself the session cannot go on.
  void append(int layer, const NewRows& rows);
  void attend(int layer, const Queries& queries);
  // Throws Error{usage} if a layer has no rows, and Error{numeric} if a selection met a NaN or an
  // infinity.
  void end();
  // Returns true if cancel() may end the step at this point. Not in decode steps, and not behind a
  // part of a page whose rows lie on no disk yet while the page is written anew.
  bool is_cancellable() const;
  // Gives up the step between two layers: the session has the tokens that it had before, and the
  // ledger counts what moved. Waits for the work.
  void cancel();
  // Ends a step of rows that were computed before: the ledger counts what they moved, but no
  // tokens.
  void end_restored();

 private:
  void require_layer(int layer) const;
  // True if a layer attends densely to several known tokens, which it then takes as a run.
  bool attends_run(int layer) const;
  // The share of the weight whose pages a prompt's chunk attends to; 1 in dense layers.
  double listed_share(int layer) const;
  // Shows a prompt's queries to scorers, and counts what they read.
  void show(int layer, const Queries& queries);
  // Counts resident rows of listed pages; only the backend knew the lists.
  void record_listed_hits();

  KvSession* session_;
  KvPool* pool_;
  Phase phase_;
  StepRange range_;
  bool is_run_;  // the tokens are appended by run_, else by decode_
  bool is_over_ = false;
  int appended_ = -1;  // the layer whose rows came last
  TokenRun run_;
  DecodeStep decode_;
};

}  // namespace sluice
