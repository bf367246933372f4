"""The live console: a page that the router serves at ``/console``, and the events that feed it.

``feed.py`` makes the events while somebody listens, ``pages.py`` answers HTTP. The page is plain
HTML, CSS and JavaScript modules: no build step, nothing from another host.

    index.html     what is where
    app.js         connects, keeps the model of what is known, tells the parts to draw
    model.js       what is known (pure): merges events, rates from counters
    draw.js        a canvas that fits its box, colours from the style sheet, scales
    latency.js     TTFT and TPOT against their objectives
    lanes.js       requests over router and workers
    workers.js     pools, workers, KV blocks
    roofline.js    each worker's point under its roofs
    requests.js    the table of recent requests, and one in detail
    chat.js        a chat that streams
    stream.js      server-sent events over fetch, with an API key; reconnects
"""
