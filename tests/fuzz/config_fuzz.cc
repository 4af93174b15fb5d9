// A config.json and, after a line "---", a generation_config.json. Accepted values lie within the
// bounds that ModelConfig gives.
#include <cmath>

#include "engine/config.h"
#include "tests/fuzz/fuzz.h"

namespace sluice::fuzz {
namespace {

std::string hold(const ModelConfig& config) {
  for (const std::int64_t size :
       {std::int64_t{config.hidden_size}, std::int64_t{config.intermediate_size},
        std::int64_t{config.num_hidden_layers}, std::int64_t{config.vocab_size},
        config.max_position_embeddings, std::int64_t{config.num_key_value_heads}}) {
    require(size >= 1 && size <= (std::int64_t{1} << 30), "sizes are bounded");
  }
  require(config.num_attention_heads % config.num_key_value_heads == 0, "heads share KV heads");
  require(config.head_dim >= 16 && config.head_dim <= 256 && config.head_dim % 2 == 0,
          "head_dim is even and 16 to 256");
  require(config.rms_norm_eps > 0.0f && config.rms_norm_eps <= 1.0f, "rms_norm_eps is bounded");
  const auto is_token = [&](TokenId id) { return id >= 0 && id < config.vocab_size; };
  require(is_token(config.bos_token_id.value_or(0)), "bos_token_id lies in the vocabulary");
  require(std::all_of(config.eos_token_ids.begin(), config.eos_token_ids.end(), is_token),
          "eos_token_id lies in the vocabulary");
  const std::vector<float> frequencies = inverse_frequencies(config);
  require(2 * frequencies.size() == static_cast<std::size_t>(config.head_dim),
          "there is a frequency for every two channels");
  require(std::all_of(frequencies.begin(), frequencies.end(),
                      [](float f) { return f >= 0.0f && f <= 1.0f; }),
          "frequencies are 0 to 1 radians per token");
  return config.architecture + " rope " + std::to_string(config.rope.scaling.index()) +
         (config.qkv_bias ? " qkv_bias" : "") + (config.o_bias ? " o_bias" : "") +
         (config.bos_token_id ? " bos" : "") + (config.eos_token_ids.empty() ? "" : " eos");
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  const Parts parts = split_parts(input);
  write_file(folder / "config.json", parts.first);
  write_file(folder / "generation_config.json", parts.second.empty() ? "{}" : parts.second);
  return answer_of(
      {ErrorCode::corrupt, ErrorCode::unsupported}, [&] { return read_config(folder); }, hold);
}

}  // namespace sluice::fuzz
