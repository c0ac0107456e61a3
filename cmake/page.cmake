# Writes OUT, a C++ file with the file PAGE as a string. Run as a script.
file(READ ${PAGE} text)
string(LENGTH "${text}" length)
set(body "#include \"godwit/serve/page.h\"\n\nnamespace godwit::serve {\nstd::string_view page() {\n  static constexpr std::string_view kPage =\n")
# A literal may not be of any length: pieces.
set(at 0)
while(at LESS length)
  string(SUBSTRING "${text}" ${at} 8000 piece)
  string(APPEND body "R\"page(${piece})page\"\n")
  math(EXPR at "${at} + 8000")
endwhile()
string(APPEND body ";\n  return kPage;\n}\n}  // namespace godwit::serve\n")
file(WRITE ${OUT} "${body}")
