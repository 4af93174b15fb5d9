// Engine and Session.
#include <nanobind/stl/filesystem.h>

#include <exception>

#include "bindings/python/src/common.h"
#include "sluice/format_names.h"

namespace sluice::python {
namespace {

std::shared_ptr<PyEngine> open_engine(
    const std::filesystem::path& model, const std::string& device, int threads, int chunk,
    const std::string& kv_dtype, const std::optional<std::string>& compute,
    const std::optional<std::string>& weights, std::optional<std::uint64_t> device_memory,
    std::optional<std::uint64_t> host_memory, std::optional<std::uint64_t> row_cache,
    std::optional<double> host_attention, const std::vector<std::filesystem::path>& disk,
    std::optional<std::uint64_t> disk_bytes) {
  EngineConfig config;
  config.model = model;
  config.device = device;
  config.threads = threads;
  config.chunk = chunk;
  config.kv_dtype = parse_row_format(kv_dtype, "kv_dtype");
  if (compute) config.compute = parse_dtype(*compute, "compute");
  if (weights) config.weights = parse_weight_code(*weights, "weights");
  config.device_memory = device_memory;
  config.host_memory = host_memory;
  config.row_cache = row_cache;
  config.host_attention = host_attention;
  if (!disk.empty()) config.disk = DiskConfig{disk, disk_bytes};
  return make_owned<PyEngine>(config);
}

SessionOptions options_of(const PyEngine& self, std::int64_t context,
                          const std::vector<std::string>& policies, int decode_batch, int sequences,
                          std::int64_t tokens, std::optional<std::uint64_t> device_memory,
                          std::optional<std::uint64_t> host_memory, bool loads,
                          std::int64_t indexed_tokens) {
  SessionOptions options;
  options.context = context;
  options.policies =
      policies_of(policies, [&](const std::string& text) { return self.engine.policy(text); });
  options.decode_batch = decode_batch;
  options.sequences = sequences;
  options.tokens = tokens;
  options.device_memory = device_memory;
  options.host_memory = host_memory;
  options.loads = loads;
  options.indexed_tokens = indexed_tokens;
  return options;
}

nb::dict info_of(const PyEngine& self) {
  const ModelInfo& info = self.engine.info();
  nb::dict dict;
  dict["architecture"] = info.architecture;
  dict["parameters"] = info.parameters;
  dict["weight_bytes"] = info.weight_bytes;
  dict["layers"] = info.kv.layers;
  dict["query_heads"] = info.kv.query_heads;
  dict["kv_heads"] = info.kv.kv_heads;
  dict["head_dim"] = info.kv.head_dim;
  dict["hidden"] = info.hidden;
  dict["vocabulary"] = info.vocabulary;
  dict["trained_context"] = info.trained_context;
  dict["window"] = nb::cast(info.window);
  dict["bos"] = nb::cast(info.bos);
  dict["eos"] = nb::cast(info.eos);
  return dict;
}

nb::dict memory_of(const MemoryUse& use) {
  nb::dict dict;
  dict["device_bytes"] = use.device_bytes;
  dict["device_peak"] = use.device_peak;
  dict["host_bytes"] = use.host_bytes;
  dict["host_peak"] = use.host_peak;
  return dict;
}

Tokens render_chat(PyEngine& self, const std::vector<std::pair<std::string, std::string>>& turns,
                   const std::string& system) {
  std::vector<ChatTurn> all;
  for (const auto& [question, answer] : turns) all.push_back({question, answer, {}});
  const std::lock_guard lock(self.mutex);
  if (!self.format) self.format = ChatFormat::load(self.model, self.engine.tokenizer());
  return self.format->render(system, all);
}

Tokens end_tokens(PyEngine& self) {
  const std::lock_guard lock(self.mutex);
  if (!self.format) self.format = ChatFormat::load(self.model, self.engine.tokenizer());
  const auto tokens = self.format->end_tokens();
  return {tokens.begin(), tokens.end()};
}

// Runs `body` without the GIL while no other thread uses the session.
auto with(PySession& self, const auto& body) {
  const Use use(self.owner, "Session");
  const Released unlocked;
  return body();
}

// Runs compute(stops). Ctrl-C ends it within its chunk, and the session keeps what it had before,
// or of that what is computed again.
nb::object with_signals(PySession& self, const auto& compute) {
  std::exception_ptr signal;  // thrown from within a chunk it would end the session
  const Stop is_signalled = [&] {
    const Locked locked;
    try {
      check_signals();
    } catch (...) {
      signal = std::current_exception();
    }
    return signal != nullptr;
  };
  const auto logits = with(self, [&] {
    const std::int64_t before = self.session.length();
    const std::span<const float> row = compute(is_signalled);
    if (signal == nullptr) return row;
    self.session.truncate(std::min(before, self.session.length()));
    std::rethrow_exception(signal);
  });
  return logits.empty() ? nb::none() : nb::cast(numpy_copy(logits));
}

nb::object prefill(PySession& self, const Tokens& tokens, nb::handle progress) {
  return with_signals(self, [&](const Stop& stops) {
    return self.session.prefill(tokens, progress_of(progress), stops);
  });
}

nb::object recompute(PySession& self, nb::handle progress) {
  return with_signals(self, [&](const Stop& stops) {
    return self.session.recompute(progress_of(progress), stops);
  });
}

std::vector<Floats> step(PyEngine& self, const std::vector<std::shared_ptr<PySession>>& sessions,
                         const Tokens& tokens) {
  if (sessions.size() != tokens.size()) {
    throw Error(ErrorCode::usage, "step: give as many tokens as sessions");
  }
  std::vector<std::unique_ptr<Use>> uses;
  std::vector<StepToken> parts;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (sessions[i] == nullptr) throw Error(ErrorCode::usage, "step: a session is None");
    uses.push_back(std::make_unique<Use>(sessions[i]->owner, "Session"));
    parts.push_back({&sessions[i]->session, tokens[i]});
  }
  std::vector<StepResult> results;
  {
    const Released unlocked;
    results = self.engine.step(parts);
  }
  std::vector<Floats> rows;
  for (const StepResult& result : results) {
    if (result.error) throw Error(*result.error);
    rows.push_back(numpy_copy(result.logits));
  }
  return rows;
}

void bind_session(nb::module_& module) {
  nb::class_<PySession> session(
      module, "Session", "The KV cache and position of one conversation; see Engine.new_session.");
  bind_generate(session);
  session
      .def("prefill", &prefill, nb::arg("tokens"), nb::arg("progress") = nb::none(),
           "Appends tokens; the logits after the last one. progress(done, total) is called between "
           "steps, and stops by returning False: then there are none.",
           nb::sig("def prefill(self, tokens: collections.abc.Sequence[int], progress: "
                   "collections.abc.Callable[[int, int], bool | None] | None = None) -> "
                   "numpy.ndarray | None"))
      .def("recompute", &recompute, nb::arg("progress") = nb::none(),
           "Computes the rows of all tokens again, so that a session goes on whose rows a disk has "
           "lost (StorageError, CorruptError). Logits and progress as for prefill.",
           nb::sig("def recompute(self, progress: collections.abc.Callable[[int, int], bool | "
                   "None] | None = None) -> numpy.ndarray | None"))
      .def(
          "decode",
          [](PySession& self, TokenId token) {
            return numpy_copy(with(self, [&] { return self.session.decode(token); }));
          },
          nb::arg("token"), "Appends a token; the logits after it.",
          nb::sig("def decode(self, token: int) -> numpy.ndarray"))
      .def(
          "score",
          [](PySession& self, const Tokens& tokens) {
            return numpy_copy(
                with(self, [&] { return self.session.score(tokens, progress_of(nb::none())); }));
          },
          nb::arg("tokens"), "Appends tokens; log p(token | all before) of all but the first.",
          nb::sig("def score(self, tokens: collections.abc.Sequence[int]) -> numpy.ndarray"))
      .def(
          "fork",
          [](PySession& self) {
            return with(self,
                        [&] { return make_owned<PySession>(self.engine, self.session.fork()); });
          },
          "A session with the same tokens, which costs only what it adds.")
      .def(
          "sibling",
          [](PySession& self) {
            return with(self,
                        [&] { return make_owned<PySession>(self.engine, self.session.sibling()); });
          },
          "An empty session in this one's memory.")
      .def(
          "truncate",
          [](PySession& self, std::int64_t length) {
            with(self, [&] { self.session.truncate(length); });
          },
          nb::arg("length"), "Forgets all tokens from `length` on.")
      .def(
          "save",
          [](PySession& self, const std::filesystem::path& directory, const std::string& note) {
            with(self, [&] { self.session.save(directory, note); });
          },
          nb::arg("directory"), nb::arg("note") = "",
          "Saves tokens, rows and a text of your own to a directory, whole or not at all.",
          nb::sig("def save(self, directory: str | os.PathLike, note: str = '') -> None"))
      .def(
          "load",
          [](PySession& self, const std::filesystem::path& directory) {
            with(self, [&] { self.session.load(directory); });
          },
          nb::arg("directory"),
          "Gives an empty session, made with loads=True or a sibling of one, what was saved; "
          "nothing "
          "is computed again.",
          nb::sig("def load(self, directory: str | os.PathLike) -> None"))
      .def_prop_ro(
          "tokens",
          [](PySession& self) {
            return with(self, [&] {
              const std::span<const TokenId> tokens = self.session.tokens();
              return Tokens(tokens.begin(), tokens.end());
            });
          },
          nb::sig("def tokens(self) -> list[int]"))
      .def("__len__",
           [](PySession& self) { return with(self, [&] { return self.session.length(); }); })
      .def_prop_rw(
          "policy",
          [](PySession& self) {
            return with(self, [&] { return to_string(self.session.policy()); });
          },
          [](PySession& self, const std::string& text) {
            with(self, [&] { self.session.use(self.engine->engine.policy(text)); });
          },
          "The policy in force, as text; set it to another one of the session's policies.")
      .def_prop_ro("engine", [](PySession& self) { return self.engine; })
      .def(
          "ledger",
          [](PySession& self) {
            return from_json(with(self, [&] { return self.session.ledger().to_json(); }));
          },
          "The rows and bytes that moved or were read: totals, totals by layer, newest steps.",
          nb::sig("def ledger(self) -> dict"));
}

}  // namespace

void bind_engine(nb::module_& module) {
  nb::class_<PyEngine> engine(module, "Engine", "A checkpoint's model; sluice/engine.h says more.");
  bind_session(module);
  bind_constraint(module, engine);
  engine
      .def(nb::new_(&open_engine), nb::arg("model"), nb::kw_only(), nb::arg("device") = "cpu",
           nb::arg("threads") = 0, nb::arg("chunk") = 0, nb::arg("kv_dtype") = "bf16",
           nb::arg("compute") = nb::none(), nb::arg("weights") = nb::none(),
           nb::arg("device_memory") = nb::none(), nb::arg("host_memory") = nb::none(),
           nb::arg("row_cache") = nb::none(), nb::arg("host_attention") = nb::none(),
           nb::arg("disk") = std::vector<std::filesystem::path>(),
           nb::arg("disk_bytes") = nb::none(), Unlocked())
      .def_prop_ro("info", &info_of, "What the checkpoint says about the model.",
                   nb::sig("def info(self) -> dict"))
      .def(
          "encode",
          [](const PyEngine& self, const std::string& text, bool plain) {
            if (plain) return self.engine.tokenizer().encode_plain(text);
            return self.engine.encode_prompt(text);
          },
          nb::arg("text"), nb::kw_only(), nb::arg("plain") = false, Unlocked(),
          "The prompt's ids, with BOS if the model expects it. plain: special tokens in the text "
          "stay text, and there is no BOS.")
      .def(
          "decode",
          [](const PyEngine& self, const Tokens& tokens, bool keep_special) {
            return self.engine.tokenizer().decode(tokens, keep_special);
          },
          nb::arg("tokens"), nb::kw_only(), nb::arg("keep_special") = false, Unlocked())
      .def("render_chat", &render_chat, nb::arg("turns"), nb::kw_only(), nb::arg("system") = "",
           Unlocked(),
           "The ids of a conversation, (question, answer) pairs; the last answer is empty.")
      .def("chat_end_tokens", &end_tokens, Unlocked(),
           "Tokens with which the template ends an answer, besides info['eos'].")
      .def(
          "policy",
          [](const PyEngine& self, const std::string& text) {
            return to_string(self.engine.policy(text));
          },
          nb::arg("text"), "The policy in full, as `sluice calibrate` adapted it.")
      .def(
          "load_weights", [](PyEngine& self) { self.engine.load_weights(); }, Unlocked())
      .def(
          "plan",
          [](PyEngine& self, std::int64_t context, const std::vector<std::string>& policies,
             int decode_batch, int sequences, std::int64_t tokens,
             std::optional<std::uint64_t> device_memory, std::optional<std::uint64_t> host_memory,
             bool loads, std::int64_t indexed_tokens) {
            return from_json(
                self.engine
                    .plan(options_of(self, context, policies, decode_batch, sequences, tokens,
                                     device_memory, host_memory, loads, indexed_tokens))
                    .to_json());
          },
          nb::sig(
              "def plan(self, context: int, policies: collections.abc.Sequence[str] = [], *, "
              "decode_batch: int = 1, sequences: int = 1, tokens: int = 0, device_memory: int | "
              "None = None, host_memory: int | None = None, loads: bool = False, "
              "indexed_tokens: int = 0) -> dict"),
          nb::arg("context"), nb::arg("policies") = std::vector<std::string>(), nb::kw_only(),
          nb::arg("decode_batch") = 1, nb::arg("sequences") = 1, nb::arg("tokens") = 0,
          nb::arg("device_memory") = nb::none(), nb::arg("host_memory") = nb::none(),
          nb::arg("loads") = false, nb::arg("indexed_tokens") = 0,
          "The bytes that such a session will take.")
      .def(
          "new_session",
          [](const std::shared_ptr<PyEngine>& self, std::int64_t context,
             const std::vector<std::string>& policies, int decode_batch, int sequences,
             std::int64_t tokens, std::optional<std::uint64_t> device_memory,
             std::optional<std::uint64_t> host_memory, bool loads, std::int64_t indexed_tokens) {
            const Released unlocked;
            return make_owned<PySession>(
                self, self->engine.new_session(options_of(*self, context, policies, decode_batch,
                                                          sequences, tokens, device_memory,
                                                          host_memory, loads, indexed_tokens)));
          },
          nb::arg("context"), nb::arg("policies") = std::vector<std::string>(), nb::kw_only(),
          nb::arg("decode_batch") = 1, nb::arg("sequences") = 1, nb::arg("tokens") = 0,
          nb::arg("device_memory") = nb::none(), nb::arg("host_memory") = nb::none(),
          nb::arg("loads") = false, nb::arg("indexed_tokens") = 0,
          "A session for up to `context` tokens; loads the weights unless they are loaded. loads: "
          "it and its siblings may load() saved ones. indexed_tokens: most of all of their tokens "
          "whose key index is on the device at a time, at least `context`; 0: all.")
      .def(
          "saved_session",
          [](const PyEngine& self, const std::filesystem::path& directory) {
            SavedSession saved;
            {
              const Released unlocked;
              saved = self.engine.saved_session(directory);
            }
            return nb::make_tuple(saved.tokens, saved.note);
          },
          nb::arg("directory"), "The tokens and the note of a saved session.",
          nb::sig("def saved_session(self, directory: str | os.PathLike) -> tuple[list[int], str]"))
      .def("step", &step, nb::arg("sessions"), nb::arg("tokens"),
           "Appends a token to each of several sessions that share memory, in one pass over the "
           "weights; the logits of each.",
           nb::sig("def step(self, sessions: collections.abc.Sequence[Session], tokens: "
                   "collections.abc.Sequence[int]) -> list[numpy.ndarray]"))
      .def("memory", [](const PyEngine& self) { return memory_of(self.engine.memory()); });
}

}  // namespace sluice::python
