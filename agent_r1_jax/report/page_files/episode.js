// An opened group: its episodes side by side, their messages, and coloured tokens.

const LONG = 20000,
  MANY = 4000; // Characters and tokens shown before one asks for more.

/** Returns the text that each token completes: a character may have several tokens. */
function decodeTokens(ids) {
  const decoder = new TextDecoder('utf-8', {ignoreBOM: true});
  return ids.map(id => {
    const piece = run.vocabulary[id];
    if (piece === undefined) return `⟨${id}⟩`;
    const bytes = Uint8Array.from(piece, c => c.charCodeAt(0));
    return decoder.decode(bytes, {stream: true});
  });
}

/** Returns [start, stop] of each turn's tokens. */
function findTurns(episode) {
  const mask = episode.columns.action_mask;
  let p = 0;
  return episode.turn_tokens.map(length => {
    while (p < mask.length && !mask[p]) p++;
    const span = [p, p + length];
    p += length;
    return span;
  });
}

/** Replaces control characters, but for tabs and newlines, by pictures of them. */
function showControls(text) {
  const picture = character => String.fromCharCode(0x2400 + character.charCodeAt(0));
  return text.replace(/[\0-\x08\x0b-\x1f]/g, picture);
}

/** Appends the tokens [start, stop) as elements that `paint` can colour. */
function addTokens(box, episode, start, stop) {
  const end = Math.min(stop, start + MANY);
  for (let p = start; p < end; p++) {
    const text = showControls(episode.pieces[p]) || '·';
    const token = make('span', 'token', text.replace(/\n/g, '↵\n'));
    token.episode = episode;
    token.position = p;
    token.style.background = scale.paint(episode.columns, p);
    box.append(token);
  }
  if (end < stop)
    addMore(box, `${format(stop - end)} more tokens`, () =>
      addTokens(box, episode, end, stop),
    );
}

/** Adds the tokens when the block comes near to what is in view. */
function addTokensLater(block, body, episode, start, stop) {
  // About as high as it will be, so that what is below stays where it is.
  body.style.minHeight = `${Math.ceil(Math.min(MANY, stop - start) / 12) * 20}px`;
  block.fill = () => {
    body.style.minHeight = '';
    addTokens(body, episode, start, stop);
  };
  nearby.observe(block);
}

let nearby; // Watches the blocks of the opened group.

function fillBlocks(entries) {
  const near = entries.filter(entry => entry.isIntersecting);
  for (const {target} of near) {
    nearby.unobserve(target);
    target.fill();
  }
  if (near.length) showMatches();
}

function addMore(box, label, show) {
  const button = make('button', 'more', label);
  button.onclick = () => {
    button.remove();
    show();
  };
  box.append(button);
}

function addText(box, whole) {
  const text = showControls(whole);
  box.append(text.slice(0, LONG));
  if (text.length > LONG) {
    addMore(box, `${format(text.length - LONG)} more characters`, () =>
      box.append(text.slice(LONG)),
    );
  }
}

function makeBlock(kind, title, notes) {
  const block = make('section', `block ${kind}`);
  const head = make('h4', '', title);
  for (const note of notes) head.append(note);
  const body = make('div', 'body');
  block.append(head, body);
  return [block, body];
}

function rewardBadge(reward) {
  const badge = make('span', 'badge', reward === null ? 'no reward' : format(reward));
  badge.style.borderColor = rewardColor(reward);
  return badge;
}

/** The messages as text; replies in their tokens where these were logged. */
function showConversation(episode) {
  const spans = episode.columns ? findTurns(episode) : [];
  return episode.messages.map(message => {
    const notes = [];
    if (message.turn)
      notes.push(make('span', 'quiet', `turn ${message.turn}, ${message.tokens} tokens`));
    if (message.reward) notes.push(rewardBadge(message.reward));
    const kind =
      message.content.startsWith('Error') && message.role === 'tool'
        ? 'tool failed'
        : message.role;
    const title = message.role === 'tool' ? `result of ${message.name}` : message.role;
    const [block, body] = makeBlock(kind, title, notes);
    const span = spans[message.turn - 1];
    if (span) addTokensLater(block, body, episode, ...span);
    else addText(body, message.content);
    for (const address of message.pictures ?? []) {
      const picture = make('img', 'picture');
      picture.src = address;
      picture.alt = 'what the policy saw';
      block.append(picture);
    }
    for (const {name, arguments: given, error} of message.calls ?? []) {
      const call = make('p', error ? 'call failed' : 'call');
      call.append(make('b', '', error ? 'unreadable call' : name), ' ');
      const shown =
        error ??
        Object.entries(given)
          .map(([k, v]) => `${k}: ${JSON.stringify(v)}`)
          .join(', ');
      addText(call, shown);
      block.append(call);
    }
    return block;
  });
}

/** The exact tokens, in the order in which the policy saw them. */
function showTokens(episode) {
  if (!episode.columns) {
    return [
      make('p', 'quiet', 'No tokens were logged of this episode (config.log_episodes).'),
    ];
  }
  const {segments, tokens} = episode.columns;
  const blocks = [];
  const edges = new Set([0]);
  segments.reduce((sum, length) => {
    edges.add(sum + length);
    return sum + length;
  }, 0);
  const turns = new Map(findTurns(episode).map(([start, stop], i) => [start, [stop, i]]));
  for (let p = 0; p < tokens.length;) {
    const [stop, turn] = turns.get(p) ?? [null, null];
    let end = stop ?? p + 1;
    while (stop === null && end < tokens.length && !turns.has(end) && !edges.has(end))
      end++;
    const segment = [...edges].filter(edge => edge <= p).length;
    const title = stop === null ? 'environment' : `turn ${turn + 1}`;
    const where = segments.length > 1 ? `segment ${segment}, tokens` : 'tokens';
    const [block, body] = makeBlock(stop === null ? 'tool' : 'assistant', title, [
      make('span', 'quiet', `${where} ${p}–${end - 1}`),
    ]);
    addTokensLater(block, body, episode, p, end);
    blocks.push(block);
    p = end;
  }
  return blocks;
}

function showFacts(episode) {
  const details = make('details');
  details.append(make('summary', '', 'Metrics and task'));
  const table = make('table');
  const facts = [...Object.entries(episode.metrics), ...Object.entries(episode.info)];
  for (const [name, value] of facts) {
    const row = make('tr');
    const shown = typeof value === 'object' ? JSON.stringify(value) : format(value);
    row.append(make('td', '', name), make('td', '', shown));
    table.append(row);
  }
  details.append(table);
  return details;
}

/** One episode of a group, as a column. */
function makeColumn(episode, i) {
  const {sample, status, reward, turns, length} = run.episodes;
  const column = make('section', 'episode');
  column.dataset.episode = i;
  const head = make('header');
  head.append(make('b', '', `Episode ${sample[i] + 1}`), rewardBadge(reward[i]));
  if (status[i] !== 'done') head.append(make('span', `status ${status[i]}`, status[i]));
  if (failures(i)) head.append(make('span', 'status error', `${failures(i)} failed`));
  head.append(make('span', 'quiet', `${turns[i]} turns, ${format(length[i])} tokens`));
  column.append(head);
  if (episode.error) column.append(make('p', 'call failed', episode.error));
  column.append(...(state.tokens ? showTokens(episode) : showConversation(episode)));
  column.append(showFacts(episode));
  return column;
}

let opened = []; // The episodes that are shown.
let scale = makeScale('none', []); // Their colours.

/** Colours the tokens that are shown, and draws the legend. */
function paint() {
  const names = listColors(opened);
  const name = names.includes(state.color) ? state.color : 'none';
  scale = makeScale(name, opened);
  for (const token of get('detail').querySelectorAll('.token')) {
    token.style.background = scale.paint(token.episode.columns, token.position);
  }
  const choices = get('colors');
  if (!choices) return;
  choices.replaceChildren(
    ...names.map(each => {
      const button = make('button', '', each);
      button.setAttribute('aria-pressed', each === name);
      button.onclick = () => change({color: each});
      return button;
    }),
  );
  const legend = get('legend');
  legend.replaceChildren(make('span', 'quiet', COLORS[name].about));
  for (const [color, label] of scale.marks) {
    const mark = make('span', 'mark', label);
    mark.style.background = color;
    legend.append(mark);
  }
}

/** Dims what the filters leave out, and highlights what is searched for. */
function showMatches() {
  for (const column of get('detail').querySelectorAll('.episode')) {
    column.classList.toggle('left-out', !selected.passes[column.dataset.episode]);
  }
  // Highlights are ranges: they leave the elements as they are.
  if (!CSS.highlights) return;
  CSS.highlights.delete('found');
  const query = state.q.toLowerCase();
  if (!query) return;
  const ranges = [];
  for (const body of get('detail').querySelectorAll('.body, .call, h2')) {
    const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
    const nodes = [];
    let text = '';
    while (walker.nextNode()) {
      nodes.push([text.length, walker.currentNode]);
      text += walker.currentNode.data.toLowerCase();
    }
    const place = at => nodes.findLast(([begin]) => begin <= at);
    for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + 1)) {
      const range = new Range();
      const [first, start] = place(at),
        [second, stop] = place(at + query.length - 1);
      range.setStart(start, Math.min(at - first, start.length));
      range.setEnd(stop, Math.min(at + query.length - second, stop.length));
      ranges.push(range);
    }
  }
  CSS.highlights.set('found', new Highlight(...ranges));
}

/** Opens the group and episode of the state. */
async function showDetail() {
  const detail = get('detail');
  const group = groups[state.group];
  if (!group) {
    opened = [];
    detail.replaceChildren(make('p', 'empty', 'Choose a group on the left, or press j.'));
    return;
  }
  const shown = state.single ? [group.members[state.member]] : group.members;
  const wanted = [state.group, state.member];
  const found = await Promise.all(shown.map(readEpisode));
  if (wanted[0] !== state.group || wanted[1] !== state.member) return;
  opened = found.map(e => ({
    ...e,
    pieces: e.columns ? decodeTokens(e.columns.tokens) : [],
  }));
  const log = run.logs[group.log];
  const head = make('header', 'group');
  const back = make('button', 'back', '← List');
  back.onclick = () => change({group: -1});
  const where = `Step ${log.step} · ${log.name} · task ${group.id}`;
  const top = make('p', 'quiet', where);
  head.append(back, top, make('h2', '', group.question || group.id));
  if (opened[0].answer) head.append(make('p', 'target', `Target: ${opened[0].answer}`));
  const tools = make('div', 'bar');
  const toggle = (label, pressed, changes) => {
    const button = make('button', '', label);
    button.setAttribute('aria-pressed', pressed);
    button.onclick = () => change(changes);
    return button;
  };
  tools.append(
    toggle('Conversation', !state.tokens, {tokens: false}),
    toggle('Exact tokens', state.tokens, {tokens: true}),
  );
  if (group.members.length > 1) {
    tools.append(
      make('span', 'gap'),
      toggle(`All ${group.members.length} side by side`, !state.single, {single: false}),
      toggle('One', state.single, {single: true}),
    );
  }
  const colors = make('span');
  colors.id = 'colors';
  const legend = make('div', 'bar');
  legend.id = 'legend';
  head.append(tools);
  if (opened.some(e => e.columns)) {
    tools.append(make('span', 'gap'), colors);
    head.append(legend);
  }
  if (!legend.parentNode)
    head.append(
      make(
        'p',
        'quiet',
        'The tokens of this group were not logged (config.log_episodes).',
      ),
    );
  const columns = make('div', 'columns');
  nearby?.disconnect();
  nearby = new IntersectionObserver(fillBlocks, {root: columns, rootMargin: '600px'});
  opened.forEach((episode, k) => {
    const column = makeColumn(episode, shown[k]);
    column.onclick = () => mark(group.members.indexOf(shown[k]));
    columns.append(column);
  });
  detail.replaceChildren(head, columns);
  mark(state.member);
  paint();
  showMatches();
}

/** Marks one episode of the group and brings it into view. */
function mark(member) {
  state.member = member;
  const i = groups[state.group].members[member];
  for (const column of get('detail').querySelectorAll('.episode')) {
    const chosen = Number(column.dataset.episode) === i;
    column.classList.toggle('chosen', chosen);
    if (!chosen) continue;
    const [own, frame] = [column, column.parentNode].map(e => e.getBoundingClientRect());
    if (own.left < frame.left) column.parentNode.scrollLeft += own.left - frame.left - 16;
    else column.parentNode.scrollLeft += Math.max(0, own.right - frame.right + 16);
  }
  writeHash();
}

/** Shows all numbers of the token under the pointer. */
function showTip(event) {
  const token = event.target.closest?.('.token');
  const tip = get('tip');
  tip.hidden = !token;
  if (!token) return;
  const {columns, pieces} = token.episode;
  const p = token.position;
  const rows = [
    ['token', JSON.stringify(pieces[p])],
    ['id', columns.tokens[p]],
    ['position', p],
    ['by', columns.action_mask[p] ? 'policy' : 'environment'],
  ];
  for (const name of listColors([token.episode]).slice(2)) {
    rows.push([name, format(readNumber(name, columns, p))]);
  }
  const table = make('table');
  for (const [name, value] of rows) {
    const row = make('tr');
    row.append(make('td', '', name), make('td', '', value));
    table.append(row);
  }
  tip.replaceChildren(table);
  const {width, height} = tip.getBoundingClientRect();
  const box = token.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - width - 8))}px`;
  const below = box.bottom + 6;
  tip.style.top = `${below + height > innerHeight ? Math.max(4, box.top - height - 6) : below}px`;
}
