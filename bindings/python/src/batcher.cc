// Batcher and its streams.
#include "sluice/batcher.h"

#include <nanobind/stl/filesystem.h>

#include <chrono>

#include "bindings/python/src/common.h"

namespace sluice::python {
namespace {

constexpr std::chrono::milliseconds kBetweenSignals{100};

struct PyBatcher {
  PyBatcher(std::shared_ptr<PyEngine> of, const BatcherOptions& options)
      : engine(std::move(of)), batcher(engine->engine, options) {}

  std::shared_ptr<PyEngine> engine;
  Batcher batcher;
};

struct PyStream {
  PyStream(std::shared_ptr<PyBatcher> of, Stream made)
      : batcher(std::move(of)), stream(std::move(made)) {}

  std::shared_ptr<PyBatcher> batcher;  // ends after its streams
  Stream stream;
};

std::shared_ptr<PyBatcher> open_batcher(
    const std::shared_ptr<PyEngine>& engine, std::int64_t context,
    const std::vector<std::string>& policies, int running, std::int64_t tokens, int cached,
    std::size_t queued, double prefill_ms, std::optional<std::uint64_t> device_memory,
    std::optional<std::uint64_t> host_memory, bool loads_prefixes, std::int64_t indexed_tokens) {
  BatcherOptions options;
  options.context = context;
  options.policies =
      policies_of(policies, [&](const std::string& text) { return engine->engine.policy(text); });
  options.running = running;
  options.tokens = tokens;
  options.cached = cached;
  options.queued = queued;
  options.prefill_ms = prefill_ms;
  options.device_memory = device_memory;
  options.host_memory = host_memory;
  options.loads_prefixes = loads_prefixes;
  options.indexed_tokens = indexed_tokens;
  return make_owned<PyBatcher>(engine, options);
}

std::shared_ptr<PyStream> submit(
    const std::shared_ptr<PyBatcher>& self, Tokens prompt, int max_tokens, double temperature,
    int top_k, double top_p, double min_p, double repetition_penalty, std::uint64_t seed,
    const std::vector<std::string>& stop, Tokens end_tokens, bool ignore_eos, int choices,
    const std::optional<std::string>& policy, int priority, std::optional<double> timeout,
    bool waits, std::optional<int> logprobs, double presence_penalty, double frequency_penalty,
    const std::vector<std::pair<TokenId, double>>& bias,
    const std::shared_ptr<PyConstraint>& constraint) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling =
      sampling_of(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop);
  request.end_tokens = std::move(end_tokens);
  request.ignore_eos = ignore_eos;
  request.choices = choices;
  if (policy) request.policy = self->engine->engine.policy(*policy);
  request.priority = priority;
  if (timeout) {
    if (!(*timeout >= 0.0 && *timeout < 1e9)) {
      throw Error(ErrorCode::usage, "`timeout`: give seconds, 0 or more");
    }
    request.deadline = std::chrono::steady_clock::now() +
                       std::chrono::milliseconds(static_cast<std::int64_t>(*timeout * 1000.0));
  }
  request.waits = waits;
  request.logprobs = logprobs;
  request.rules.presence_penalty = presence_penalty;
  request.rules.frequency_penalty = frequency_penalty;
  for (const auto& [token, value] : bias) request.rules.bias.push_back({token, value});
  request.constraint = constraint_of(constraint, *self->engine);
  return make_owned<PyStream>(self, self->batcher.submit(std::move(request)));
}

// The next piece, or none after the last one. None, too, after `most`, if given.
std::optional<Piece> next_piece(PyStream& self, std::optional<double> most) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    std::optional<Piece> piece;
    bool has_ended = false;
    {
      const Released unlocked;
      piece = self.stream.next_within(kBetweenSignals);
      has_ended = self.stream.ended();
    }
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (piece || has_ended || (most && waited.count() >= *most)) return piece;
    check_signals();
  }
}

std::vector<TokenId> token_ids(const Piece& piece) {
  std::vector<TokenId> ids;
  for (const ScoredToken& token : piece.tokens) ids.push_back(token.token);
  return ids;
}

// (token, log probability, [(token, log probability) of the likeliest]).
nb::list scores_of(const Piece& piece) {
  nb::list all;
  for (const ScoredToken& token : piece.tokens) {
    nb::list top;
    for (const TokenLogprob& other : token.top)
      top.append(nb::make_tuple(other.token, other.logprob));
    all.append(nb::make_tuple(token.token, token.logprob, top));
  }
  return all;
}

nb::dict usage_of(const PyStream& self) {
  const Usage usage = self.stream.usage();
  nb::dict dict;
  dict["prompt_tokens"] = usage.prompt_tokens;
  dict["reused_tokens"] = usage.reused_tokens;
  dict["answer_tokens"] = usage.answer_tokens;
  dict["preemptions"] = usage.preemptions;
  dict["queue_seconds"] = usage.queue_seconds;
  dict["first_token_seconds"] = usage.first_token_seconds;
  dict["seconds"] = usage.seconds;
  return dict;
}

nb::dict stats_of(const PyBatcher& self) {
  const BatcherStats stats = self.batcher.stats();
  nb::dict dict;
  dict["submitted"] = stats.submitted;
  dict["refused"] = stats.refused;
  dict["failed"] = stats.failed;
  dict["prompt_tokens"] = stats.prompt_tokens;
  dict["reused_tokens"] = stats.reused_tokens;
  dict["answer_tokens"] = stats.answer_tokens;
  dict["preemptions"] = stats.preemptions;
  dict["steps"] = stats.steps;
  dict["queued"] = stats.queued;
  dict["running"] = stats.running;
  dict["cached"] = stats.cached;
  dict["free_tokens"] = stats.free_tokens;
  dict["planned_tokens"] = stats.planned_tokens;
  return dict;
}

template <auto kWork>
nb::dict prefixes(PyBatcher& self, const std::filesystem::path& directory) {
  SavedPrefixes report;
  {
    const Released unlocked;
    report = (self.batcher.*kWork)(directory);
  }
  nb::dict dict;
  dict["sessions"] = report.sessions;
  dict["tokens"] = report.tokens;
  dict["skipped"] = report.skipped;
  return dict;
}

}  // namespace

void bind_batcher(nb::module_& module) {
  nb::class_<Piece>(module, "Piece", "A part of an answer.")
      .def_ro("choice", &Piece::choice)
      .def_ro("text", &Piece::text)
      .def_prop_ro("tokens", &token_ids, "Drawn since the last piece; their text may follow later.")
      .def_prop_ro("scores", &scores_of,
                   "(token, logprob, [(token, logprob), ...]) of the tokens; NaN unless asked for.",
                   nb::sig("def scores(self) -> list[tuple[int, float, list[tuple[int, float]]]]"))
      .def_prop_ro("finish_reason", [](const Piece& self) -> std::optional<std::string> {
        if (!self.finish) return std::nullopt;
        return std::string(to_string(*self.finish));
      });

  nb::class_<PyStream>(module, "Stream", "The answers to a request: an iterator over pieces.")
      .def("__iter__", [](const std::shared_ptr<PyStream>& self) { return self; })
      .def("__next__",
           [](PyStream& self) {
             auto piece = next_piece(self, {});
             if (!piece) throw nb::stop_iteration();
             return std::move(*piece);
           })
      .def("next_within", &next_piece, nb::arg("timeout"),
           "The next piece; None if none comes within `timeout` seconds, or the stream has ended.")
      .def_prop_ro("ended", [](const PyStream& self) { return self.stream.ended(); })
      .def(
          "cancel", [](PyStream& self) { self.stream.cancel(); }, Unlocked())
      .def("usage", &usage_of);

  nb::class_<PyBatcher>(module, "Batcher", "Serves many requests with one engine.")
      .def(nb::new_(&open_batcher), nb::arg("engine"), nb::kw_only(), nb::arg("context"),
           nb::arg("policies") = std::vector<std::string>(), nb::arg("running") = 16,
           nb::arg("tokens") = 0, nb::arg("cached") = 16, nb::arg("queued") = 1024,
           nb::arg("prefill_ms") = 0.0, nb::arg("device_memory") = nb::none(),
           nb::arg("host_memory") = nb::none(), nb::arg("loads_prefixes") = false,
           nb::arg("indexed_tokens") = 0, Unlocked())
      .def("submit", &submit, nb::arg("prompt"), nb::kw_only(), nb::arg("max_tokens") = 128,
           nb::arg("temperature") = 0.0, nb::arg("top_k") = 0, nb::arg("top_p") = 1.0,
           nb::arg("min_p") = 0.0, nb::arg("repetition_penalty") = 1.0, nb::arg("seed") = 0,
           nb::arg("stop") = std::vector<std::string>(), nb::arg("end_tokens") = Tokens(),
           nb::arg("ignore_eos") = false, nb::arg("choices") = 1, nb::arg("policy") = nb::none(),
           nb::arg("priority") = 0, nb::arg("timeout") = nb::none(), nb::arg("waits") = true,
           nb::arg("logprobs") = nb::none(), nb::arg("presence_penalty") = 0.0,
           nb::arg("frequency_penalty") = 0.0,
           nb::arg("bias") = std::vector<std::pair<TokenId, double>>(),
           nb::arg("constraint") = nb::none(), Unlocked())
      .def(
          "drain",
          [](PyBatcher& self, double seconds) {
            if (!(seconds >= 0.0 && seconds < 1e9)) {
              throw Error(ErrorCode::usage, "`seconds`: give 0 or more");
            }
            self.batcher.drain(
                std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0)));
          },
          nb::arg("seconds"), Unlocked(), "Refuses further requests and waits for the others.")
      .def(
          "load_prefixes", &prefixes<&Batcher::load_prefixes>, nb::arg("directory"),
          "Makes the saved sessions in a directory known as prefixes of prompts. The batcher needs "
          "loads_prefixes=True.",
          nb::sig("def load_prefixes(self, directory: str | os.PathLike) -> dict"))
      .def("save_prefixes", &prefixes<&Batcher::save_prefixes>, nb::arg("directory"),
           "Saves what finished requests have left for prompts that begin with it.",
           nb::sig("def save_prefixes(self, directory: str | os.PathLike) -> dict"))
      .def("stats", &stats_of);
}

}  // namespace sluice::python
