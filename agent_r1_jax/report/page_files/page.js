// What is shown: the state in the address, the list of groups, the keys.

const FILTERS = {
  q: '',
  set: '',
  step: '',
  status: '',
  tool: '',
  error: '',
  order: '',
  low: '',
  high: '',
};
const state = {
  view: 'run',
  group: -1,
  member: 0,
  tokens: false,
  single: false,
  color: 'log-prob',
  ...FILTERS,
};
let selected = {passes: new Uint8Array(), chosen: []};
const ROW = 46; // Pixels of a row of the list.

/** The state is in the address, so that a page that is made anew and reloaded stays. */
function readHash() {
  const found = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(state)) {
    const text = found.get(name);
    if (text === null) continue;
    if (typeof value === 'number') state[name] = Number(text);
    else state[name] = typeof value === 'boolean' ? text === 'true' : text;
  }
}

const INITIAL = {...state};

function writeHash() {
  const changed = Object.entries(state).filter(
    ([name, value]) => value !== INITIAL[name],
  );
  history.replaceState(null, '', `#${new URLSearchParams(changed)}`);
}

/** Changes the state and shows it. */
async function change(changes) {
  const filtered = Object.keys(changes).some(name => name in FILTERS);
  Object.assign(state, changes);
  if (filtered) filter();
  const onlyColor = Object.keys(changes).every(name => name === 'color');
  show(filtered);
  if (state.view !== 'episodes') return;
  if (onlyColor) paint();
  else if (!filtered || 'group' in changes) await showDetail();
  else showMatches();
}

function filter() {
  selected = select(state);
  const n = selected.passes.reduce((a, b) => a + b, 0);
  const waiting = state.q && !texts ? ' Reading the texts…' : '';
  get('count').textContent =
    `${format(n)} of ${format(selected.passes.length)} episodes ` +
    `in ${format(selected.chosen.length)} groups.${waiting}`;
}

function show(fromTop) {
  for (const view of ['run', 'episodes']) {
    get(`${view}-view`).hidden = state.view !== view;
    document
      .querySelector(`[data-view=${view}]`)
      .setAttribute('aria-pressed', state.view === view);
  }
  get('episodes-view').classList.toggle('opened', state.group >= 0);
  const form = get('filters');
  for (const name of Object.keys(FILTERS)) {
    if (form.elements[name].value !== state[name])
      form.elements[name].value = state[name];
  }
  if (fromTop) get('list').scrollTop = 0;
  if (state.view === 'episodes') showList();
  else if (!get('curves').children.length) showCurves();
  writeHash();
}

/** Draws the rows of the list that are in view. */
function showList() {
  const list = get('list'),
    inside = list.firstChild;
  inside.style.height = `${selected.chosen.length * ROW}px`;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(
    selected.chosen.length,
    first + Math.ceil(list.clientHeight / ROW) + 10,
  );
  const rows = [];
  for (let at = first; at < last; at++) rows.push(makeRow(selected.chosen[at], at));
  inside.replaceChildren(...rows);
}

function makeRow(number, at) {
  const group = groups[number],
    log = run.logs[group.log];
  const row = make('div', 'row');
  row.id = `row-${number}`;
  row.style.top = `${at * ROW}px`;
  row.setAttribute('role', 'option');
  row.setAttribute('aria-selected', number === state.group);
  const dots = make('span', 'dots');
  for (const i of group.members.slice(0, 16)) {
    const dot = make('i', selected.passes[i] ? '' : 'left-out');
    dot.style.background = rewardColor(run.episodes.reward[i]);
    dots.append(dot);
  }
  const line = make('span', 'line');
  line.append(dots, make('span', 'quiet', `step ${log.step} · ${log.name}`));
  const failed = group.members.reduce((sum, i) => sum + failures(i), 0);
  if (failed) line.append(make('span', 'status error', `${failed} failed`));
  const others = group.members.filter(i => run.episodes.status[i] !== 'done');
  if (others.length) line.append(make('span', 'status', run.episodes.status[others[0]]));
  line.append(make('span', 'mean', format(group.mean)));
  row.append(make('span', 'question', group.question || group.id), line);
  row.onclick = () => openGroup(number);
  return row;
}

let lowest = 0,
  highest = 1; // The rewards of the run, as the ends of their colours.

function rewardColor(reward) {
  if (reward === null || Number.isNaN(reward)) return 'var(--grey)';
  const share = (2 * (reward - lowest)) / (highest - lowest || 1) - 1;
  const end = share < 0 ? '--bad' : '--good';
  return `color-mix(in oklab, var(${end}) ${(100 * Math.abs(share)).toFixed(0)}%, var(--middle))`;
}

/** Opens a group at its first episode that passes the filters. */
function openGroup(number) {
  const {members} = groups[number];
  const passing = members.findIndex(i => selected.passes[i]);
  return change({group: number, member: Math.max(0, passing)});
}

/** Opens the next or previous group of the list. */
function step(by) {
  if (!selected.chosen.length) return;
  const at = selected.chosen.indexOf(state.group);
  const to = at < 0 ? 0 : Math.min(selected.chosen.length - 1, Math.max(0, at + by));
  const list = get('list');
  const top = to * ROW;
  if (top < list.scrollTop || top + ROW > list.scrollTop + list.clientHeight) {
    list.scrollTop = top - list.clientHeight / 2;
  }
  openGroup(selected.chosen[to]);
}

function stepMember(by) {
  const members = groups[state.group]?.members.length ?? 0;
  const to = state.member + by;
  if (to < 0 || to >= members) return;
  if (state.single) change({member: to});
  else mark(to);
}

function stepOf(by) {
  const steps = [...new Set(run.logs.map(log => log.step))].sort((a, b) => a - b);
  const at =
    state.step === '' ? (by > 0 ? -1 : steps.length) : steps.indexOf(Number(state.step));
  const to = at + by;
  change({step: to in steps ? String(steps[to]) : '', view: 'episodes'});
  if (state.group >= 0 && selected.chosen.length) openGroup(selected.chosen[0]);
}

/** Shows the episodes of a step, or of the last one before it that has any. */
function showStep(step) {
  const steps = run.logs.map(log => log.step).filter(s => s <= step);
  if (steps.length)
    change({...FILTERS, step: String(Math.max(...steps)), view: 'episodes', group: -1});
}

function cycleColor(by) {
  const names = listColors(opened);
  if (!names.length) return;
  const at = Math.max(0, names.indexOf(state.color));
  change({color: names[(at + by + names.length) % names.length]});
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  // A page in a file may not keep anything.
  try {
    localStorage.setItem('theme', theme);
  } catch {
    /* The choice is not kept. */
  }
}

const isDark = () => document.documentElement.dataset.theme === 'dark';
const KEYS = {
  1: () => change({view: 'run'}),
  2: () => change({view: 'episodes'}),
  j: () => step(1),
  k: () => step(-1),
  l: () => stepMember(1),
  h: () => stepMember(-1),
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  ']': () => stepOf(1),
  '[': () => stepOf(-1),
  s: () => change({single: !state.single}),
  t: () => change({tokens: !state.tokens}),
  c: () => cycleColor(1),
  C: () => cycleColor(-1),
  '/': () => {
    change({view: 'episodes'});
    get('filters').elements.q.focus();
  },
  x: () => change({...FILTERS}),
  d: () => setTheme(isDark() ? 'light' : 'dark'),
  '?': () => get('keys').showModal(),
  Escape: () => change({group: -1}),
};
const MOVES = ['j', 'k', 'l', 'h', 'ArrowDown', 'ArrowUp'];

function onKey(event) {
  const {key, target} = event;
  if (event.ctrlKey || event.metaKey || event.altKey || get('keys').open) return;
  if (target.matches('input, select')) {
    if (key === 'Escape' || (key === 'Enter' && target.name === 'q')) {
      target.blur();
      get('list').focus();
      event.preventDefault();
    }
    return;
  }
  if (!KEYS[key] || (state.view !== 'episodes' && MOVES.includes(key))) return;
  // Arrows scroll what has the focus, unless that is the list.
  if (key.startsWith('Arrow') && target.id !== 'list') return;
  event.preventDefault();
  KEYS[key]();
}

function fill(select, values, all) {
  select.replaceChildren(
    ...['', ...values].map(value => {
      const option = make('option', '', value === '' ? all : String(value));
      option.value = value;
      return option;
    }),
  );
}

function prepareFilters() {
  const form = get('filters'),
    unique = list => [...new Set(list)].sort();
  fill(form.elements.set, unique(run.logs.map(log => log.name)), 'all');
  const steps = [...new Set(run.logs.map(log => log.step))].sort((a, b) => a - b);
  fill(form.elements.step, steps, 'all');
  fill(form.elements.status, unique(run.episodes.status), 'all');
  fill(form.elements.tool, unique(run.episodes.tools.flat()), 'all');
  fill(form.elements.error, Object.keys(ERRORS), 'all');
  fill(form.elements.order, Object.keys(ORDERS).slice(1), Object.keys(ORDERS)[0]);
  form.oninput = event => change({[event.target.name]: event.target.value});
  form.onreset = event => {
    event.preventDefault();
    change({...FILTERS});
  };
  form.onsubmit = event => event.preventDefault();
}

function connect() {
  document.addEventListener('keydown', onKey);
  document.addEventListener('pointerover', showTip);
  get('list').addEventListener('scroll', showList, {passive: true});
  for (const button of document.querySelectorAll('[data-view]')) {
    button.onclick = () => change({view: button.dataset.view});
  }
  get('theme').onclick = KEYS.d;
  get('help').onclick = KEYS['?'];
  get('metric-search').oninput = get('constant').onchange = showCurves;
  get('changed').onchange = showConfig;
  let width = innerWidth;
  addEventListener('resize', () => {
    if (state.view === 'episodes') showList();
    else if (width !== innerWidth) showCurves();
    width = innerWidth;
  });
  addEventListener('hashchange', () => {
    readHash();
    filter();
    show();
    showDetail();
  });
}

async function start() {
  let theme = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
  try {
    theme = localStorage.getItem('theme') ?? theme;
  } catch {
    /* See setTheme. */
  }
  document.documentElement.dataset.theme = theme;
  await load();
  const rewards = run.episodes.reward.filter(r => r !== null);
  lowest = Math.min(0, lowestOf(rewards));
  highest = Math.max(1, highestOf(rewards));
  get('made').textContent = `as of ${new Date(run.made).toLocaleString()}`;
  get('problems').hidden = !run.problems.length;
  get('problems').textContent = run.problems.join('\n');
  prepareFilters();
  connect();
  showTiles();
  showConfig();
  readHash();
  if (!run.metrics.steps.length) state.view = 'episodes';
  filter();
  show(true);
  if (state.view === 'episodes') await showDetail();
  await loadTexts();
  if (state.q) {
    filter();
    showList();
  }
  document.documentElement.dataset.ready = 'yes';
}

start();
