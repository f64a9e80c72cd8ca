#include "gradwire/exec/plan/built_in_model.h"

#include "gradwire/codec/codec.h"
#include "gradwire/transport/transport.h"

namespace gradwire::exec {

schedule::CostModel built_in_model(std::string_view within, std::string_view between, int cores) {
  schedule::CostModel model =
      schedule::default_model(transport::transport_kind(within).within_host,
                              transport::transport_kind(between).between_hosts, cores);
  for (const std::string_view name : codec::codec_names()) {
    const auto codec = codec::make_codec(name);
    // Other codecs encode nothing: arrays travel as they are, or as collectives of plain arrays.
    if (codec->combine() != codec::Combine::kReencode) continue;
    const auto [encode, decode] = codec->seconds_per_byte();
    model.codecs.insert_or_assign(std::string(name), schedule::CodecCost{encode, decode});
  }
  return model;
}

}  // namespace gradwire::exec
