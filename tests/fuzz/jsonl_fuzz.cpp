// data/documents and io/jsonl: any bytes as a file of documents. The first byte chooses the kind of file.
#include "godwit/data/documents.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  if (size == 0) return 0;
  constexpr const char* kNames[] = {"x.jsonl", "x.txt", "x.jsonl.zst", "x.txt.zst"};
  const auto path = fuzz::as_file(kNames[data[0] % 4], fuzz::text(data + 1, size - 1));
  fuzz::accepts([&] {
    uint64_t before = 0;
    data::read_documents(path, [&](const data::Document&, uint64_t consumed) {
      fuzz::require(consumed >= before && consumed <= size - 1);
      before = consumed;
    });
  });
  return 0;
}
