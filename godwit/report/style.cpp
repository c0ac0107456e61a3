#include "godwit/report/page.h"

namespace godwit::report {

const char* const kStyle = R"css(
:root { color-scheme: light dark; --bg:#fbfbfa; --card:#fff; --ink:#1b1d22; --soft:#5c626e; --rule:#e4e4e0; --grid:#ecece8;
  --c0:#2563eb; --c1:#d9480f; --c2:#0b8457; --c3:#a21caf; --c4:#b07900; --c5:#0e7490; --c6:#be123c; --c7:#57606a;
  --good:#0b8457; --bad:#c81e1e; --warn-bg:#fff4d6; --warn-ink:#6b4a00;
  --q0:#7a1f5c; --q1:#2b6cb0; --q2:#6ea8dc; --q3:#b9d6ef; --q4:#ededea; --q5:#f9d7b0; --q6:#f2a765; --q7:#df6a2b; --q8:#a83208; }
@media (prefers-color-scheme: dark) { :root { --bg:#14161a; --card:#1c1f25; --ink:#e7e8ea; --soft:#9aa1ad; --rule:#2d323b; --grid:#272b33;
  --c0:#6ea8ff; --c1:#ff9a5c; --c2:#4fd1a1; --c3:#e08bf0; --c4:#e6b84a; --c5:#5fd0e6; --c6:#ff7d95; --c7:#aab2bd;
  --good:#4fd1a1; --bad:#ff7b7b; --warn-bg:#3a2f12; --warn-ink:#ffdf94;
  --q0:#ff5fc4; --q1:#4a90e2; --q2:#3a6ba5; --q3:#2b4666; --q4:#2b2e35; --q5:#5b4024; --q6:#96592a; --q7:#d97b35; --q8:#ffb066; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--bg); color:var(--ink); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; }
main { max-width:1240px; margin:0 auto; padding:20px 16px 60px; }
h1 { font-size:1.5rem; margin:.2em 0 .6em; overflow-wrap:anywhere; } h2 { font-size:1.15rem; margin:2em 0 .6em; }
p { margin:.4em 0; } .lead { color:var(--soft); max-width:75ch; }
.note { background:var(--warn-bg); color:var(--warn-ink); padding:.5em .8em; border-radius:8px; margin:.4em 0; overflow-wrap:anywhere; }
.scroll { overflow-x:auto; background:var(--card); border:1px solid var(--rule); border-radius:10px; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th,td { text-align:right; padding:.45em .8em; border-bottom:1px solid var(--rule); white-space:nowrap; }
th:first-child,td:first-child { text-align:left; } tr:last-child td { border-bottom:0; } th { color:var(--soft); font-weight:600; }
.good-text { color:var(--good); font-weight:600; } .bad-text { color:var(--bad); font-weight:600; }
.grid2 { display:grid; gap:14px; margin-bottom:14px; grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr)); }
figure { margin:0; padding:12px 12px 8px; background:var(--card); border:1px solid var(--rule); border-radius:10px; min-width:0; }
figcaption { font-weight:600; margin-bottom:.35em; overflow-wrap:anywhere; }
figure svg { display:block; width:100%; height:auto; }
.none { color:var(--soft); }
.legend { display:flex; flex-wrap:wrap; gap:.15em 1em; color:var(--soft); font-size:.85rem; margin-bottom:.3em; }
.legend span { display:inline-flex; align-items:center; gap:.4em; }
.key { width:14px; height:10px; border-radius:2px; display:inline-block; } .key.round { width:8px; height:8px; border-radius:50%; }
svg text { font-size:12px; fill:var(--soft); } .label { fill:var(--soft); } .middle { text-anchor:middle; } .end { text-anchor:end; }
.mark-label { font-size:11.5px; font-weight:600; paint-order:stroke; stroke:var(--card); stroke-width:3px; }
.grid { stroke:var(--grid); } .axis { stroke:var(--soft); } .mark { stroke:var(--soft); stroke-dasharray:3 4; opacity:.7; }
.line { fill:none; stroke-width:1.8; stroke-linejoin:round; stroke-linecap:round; } .line.faint { stroke-width:1; } .dashed { stroke-dasharray:5 4; }
.flag { stroke:var(--card); stroke-width:1.5; } .flag.good { fill:var(--good); } .flag.bad { fill:var(--bad); } .dot { stroke:var(--card); stroke-width:1; }
.line.c0{stroke:var(--c0)} .line.c1{stroke:var(--c1)} .line.c2{stroke:var(--c2)} .line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)} .line.c5{stroke:var(--c5)} .line.c6{stroke:var(--c6)} .line.c7{stroke:var(--c7)}
.dot.c0{fill:var(--c0)} .dot.c1{fill:var(--c1)} .dot.c2{fill:var(--c2)} .dot.c3{fill:var(--c3)}
.dot.c4{fill:var(--c4)} .dot.c5{fill:var(--c5)} .dot.c6{fill:var(--c6)} .dot.c7{fill:var(--c7)}
.b0{background:var(--c0)} .b1{background:var(--c1)} .b2{background:var(--c2)} .b3{background:var(--c3)}
.b4{background:var(--c4)} .b5{background:var(--c5)} .b6{background:var(--c6)} .b7{background:var(--c7)}
.q0{fill:var(--q0);background:var(--q0)} .q1{fill:var(--q1);background:var(--q1)} .q2{fill:var(--q2);background:var(--q2)}
.q3{fill:var(--q3);background:var(--q3)} .q4{fill:var(--q4);background:var(--q4)} .q5{fill:var(--q5);background:var(--q5)}
.q6{fill:var(--q6);background:var(--q6)} .q7{fill:var(--q7);background:var(--q7)} .q8{fill:var(--q8);background:var(--q8)}
details { margin:.5em 0; } summary { cursor:pointer; } pre { white-space:pre-wrap; overflow-wrap:anywhere; font-size:.8rem; padding:.6em .8em; margin:.3em 0;
  background:var(--card); border-radius:6px; } pre.read { color:var(--soft); margin-right:3em; } pre.written { margin-left:3em; }
@media (max-width:560px) { main { padding:12px 10px 40px; } figure { padding:10px 6px 6px; } svg text { font-size:17px; } .mark-label { font-size:16px; }
  .legend { font-size:.9rem; } th,td { padding:.4em .55em; } }
@media print { figure, .scroll { break-inside:avoid; } }
)css";

}  // namespace godwit::report
