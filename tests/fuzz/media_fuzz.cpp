// data/tar, data/media_file and io/base64: any bytes as an archive of samples, a file of pictures, base64.
#include "godwit/data/documents.h"
#include "godwit/data/media_file.h"
#include "godwit/io/base64.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  if (size == 0) return 0;
  const std::string_view bytes = fuzz::text(data + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      fuzz::accepts([&] {
        data::read_documents(fuzz::as_file("x.tar", bytes), [&](const data::Document& d, uint64_t consumed) {
          fuzz::require(!d.text.empty() && d.members && consumed <= bytes.size());
        });
      });
      break;
    case 1:
      fuzz::accepts([&] {
        const data::MediaFile file(fuzz::as_file("x.gwm", bytes));
        for (const data::MediaRecord& item : file.all()) {
          for (uint32_t i = 0; i < item.frames; ++i)
            fuzz::require(file.frame(item.first_frame + i).size() <= bytes.size());
          fuzz::require(!file.items(item.document).empty());
        }
      });
      break;
    default:
      fuzz::accepts([&] { fuzz::require(io::decode_base64(bytes, "text").size() <= bytes.size()); });
      fuzz::accepts([&] { io::decode_data_url(bytes, "url"); });
  }
  return 0;
}
