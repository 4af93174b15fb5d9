// How many drafts a step verifies, by how many were accepted lately. A function of counts alone, so
// that steps repeat from run to run.
#pragma once

#include <array>

namespace sluice {

class DraftPace {
 public:
  // The time that verifying a draft adds to a step of one token, as a share of its products' time.
  static constexpr double kVerifyCost = 0.1;
  // Steps without drafts after which one is tried again.
  static constexpr int kRetrySteps = 16;

  // `most`: drafts of a step; `cost`: Drafter::cost().
  DraftPace(int most, double cost) : most_(most), cost_(cost + kVerifyCost) {}

  // Drafts of `kind` for the next step: the number for which tokens per time are expected to be
  // most. 0 if drafts do not pay, with a retry now and then. `own`: the share of a step's bytes
  // that every token reads for itself, rows and index; the rest are weights, read once.
  int next(int kind, double own) const;
  // A step of this kind of drafts. `drafted` 0: drafts were not wanted, see next().
  void note(int kind, int drafted, int accepted);

 private:
  struct Kind {
    double rate = 0.5;  // the share of drafts that are accepted, weighing later ones more
    int skipped = 0;    // steps since the last with a draft
  };

  int best(double rate, double cost) const;

  int most_;
  double cost_;
  std::array<Kind, 2> kinds_;
};

}  // namespace sluice
